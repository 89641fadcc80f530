"""`oval demo` on tiny models: every part runs, one that fails leaves the others, and the page stands alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.demo import measuring
from oval_adapters.demo.settings import demo_file
from oval_adapters.models import smol_llava
from oval_core.errors import ConfigError
from oval_mm.mmbench import read_mmbench
from oval_mm.pictures import read_picture

LAYERS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    text = tiny_models.save_checkpoint(tmp_path_factory.mktemp("text"), None)
    return text, tiny_llava.save_llava(tmp_path_factory.mktemp("llava"), **LAYERS)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two questions and a prompt: a tiny model has a token a byte."""
    folder = tmp_path_factory.mktemp("files")
    table = demo_file("mmbench_sample.tsv").read_text(encoding="utf-8").split("\n")
    (folder / "mmbench_sample.tsv").write_text("\n".join(table[:3]) + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "One two one two", "category": "few"}\n')
    monkeypatch.setattr(measuring, "demo_file", lambda name: folder / name)


def run(page: Path, text: object, vision: object, *more: str) -> Result:
    arguments = ["demo", "--html", page, "--text-model", text, "--vision-model", vision, "--quick"]
    return CliRunner().invoke(create_app(), [*map(str, arguments), "--dtype", "float32", *more])


def result_of(result: Result, status: int = 0) -> dict[str, Any]:
    assert result.exit_code == status, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


class Links(HTMLParser):
    """Everything that a page would load or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_whole_demo(models: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    got = result_of(run(page, *models, "--json"))
    parts = got["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(parts, "done")
    assert list(parts) == ["models", "answer", "mmbench_sample", "acceptance"]
    answer = parts["answer"]
    assert answer["image_pages"] == 1, "2 x 2 patches"
    assert answer["tokens"] == sum(answer["arrivals"])
    assert 0 < answer["image_share"] < 1
    assert answer["bytes_prefetched"] > 0
    assert 0 < answer["page_hit_rate"] <= 1
    assert parts["mmbench_sample"]["questions"] == 2
    assert parts["acceptance"]["tau"] >= 1
    assert parts["acceptance"]["identical"] == 1
    text = page.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert all(link.startswith(("data:image/png", "#picture-")) for link in links.found)
    assert links.tags.count("section") == answer["tokens"] + 1
    assert "https:" not in text
    assert "link" not in links.tags
    assert "What each token read" in text
    assert got["whole"] is True
    assert set(got["versions"]) >= {"torch", "transformers"}


def test_a_part_that_fails_leaves_the_others(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no <luck>")

    monkeypatch.setattr(measuring, "measure_sample", broken)
    page = tmp_path / "demo.html"
    result = run(page, *models, "--json")
    got = result_of(result, status=1)
    assert got["parts"]["mmbench_sample"]["state"] == "failed"
    assert got["parts"]["mmbench_sample"]["reason"] == "RuntimeError: no <luck>"
    assert got["parts"]["acceptance"]["state"] == "done"
    assert "mmbench_sample failed: RuntimeError: no <luck>" in result.stderr
    assert "no &lt;luck&gt;" in page.read_text(encoding="utf-8")


def test_without_trained_weights_it_runs_on_text_and_says_so(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise ConfigError("model 'smol-llava': got no trained projector")

    monkeypatch.setattr(smol_llava, "weights_sha256", none)
    page = tmp_path / "demo.html"
    result = run(page, models[0], "smol-llava", "--question", "Which boats?", "--json")
    got = result_of(result)
    assert "smol-llava has no trained weights" in result.stderr
    assert got["parts"]["mmbench_sample"]["state"] == "skipped"
    assert got["parts"]["models"]["vision_model"] is None
    assert got["parts"]["answer"]["image_pages"] == 0
    assert got["parts"]["answer"]["image_share"] is None
    assert "Which boats?" in page.read_text(encoding="utf-8")


def test_wrong_paths_are_told_before_anything_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(create_app(), ["demo", "--html", str(tmp_path / "no" / "a.html")])
    assert result.exit_code == 2
    assert "html: no folder" in result.stderr
    result = run(tmp_path / "a.html", "x", "y", "--picture", str(tmp_path / "none.png"))
    assert result.exit_code == 2
    assert "picture: no file" in result.stderr


def test_what_ships_is_whole_and_small() -> None:
    files = [demo_file(name) for name in ("LICENSE.txt", "mmbench_sample.tsv", "notes.txt", "picture.jpg", "prompts.jsonl")]  # fmt: skip
    assert sum(path.stat().st_size for path in files) < 300_000
    table = read_mmbench(files[1], strict=True)
    letters = [question.answer for question in table.questions]
    assert len(letters) >= 12
    assert max(map(letters.count, "ABCD")) - min(map(letters.count, "ABCD")) <= 1
    for question in table.questions:
        assert len(set(question.options.values())) == 4
        assert table.pictures.load(question.pictures[0]).size == (168, 168)
    assert read_picture(files[3]).size == (336, 336)
    assert "public domain" in files[0].read_text(encoding="utf-8")

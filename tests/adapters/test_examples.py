"""Every example runs offline with a tiny random model, and is short."""

import importlib.util
import sys
from pathlib import Path

import pytest
import tiny_models

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
EXPECTED = {
    "article_call_style": "same tokens as Hugging Face's cache: True",
    "continue_a_chat": "tokens computed in all:",
    "generate_with_oval": "'backend': 'torch'",
    "read_a_part": "of the attention mass",
    "share_a_prefix": "tokens, computed once",
    "speculative": "same tokens as plain decoding: True",
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MAX_LINES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that has a token a byte."""
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), TEMPLATE)


def test_every_example_is_expected() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--model", str(folder)])
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert EXPECTED[path.stem] in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES

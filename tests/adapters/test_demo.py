"""`oval demo` on tiny models: every part runs, one that fails leaves the others, and the page stands alone."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
from PIL import Image
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.demo import measuring
from oval_adapters.demo import run as demo_run
from oval_adapters.demo.page import quiet_tags
from oval_adapters.demo.settings import bundled, demo_file, says_the_same
from oval_adapters.demo.wording import forwards, percent
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
    assert answer["shows"] == bundled().shows
    assert answer["is_right"] is False, "random weights"
    assert answer["most_pages_away"] <= answer["pages_then"]
    assert parts["mmbench_sample"]["questions"] == 2
    assert parts["mmbench_sample"]["orders"] == 4
    assert parts["mmbench_sample"]["rows"] == 8
    assert parts["acceptance"]["tau_interval"] is None, "one prompt"
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
    assert f"What the picture really shows: {bundled().shows}: the answer is not that." in text
    assert "2 questions of four options, each in 4 orders of its options (8 answers)" in text
    assert "95 %" not in text
    (table,) = re.findall(r'"row">attention on the picture</th><td>([0-9.]+ %)', text)
    (panel,) = re.findall(r"the whole answer: ([0-9.]+ %) of the attention", text)
    assert table == panel == percent(answer["image_share"])
    assert got["seconds"] >= got["start_s"] + sum(part["seconds"] for part in parts.values()) - 0.05
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


def test_page_and_terminal_tell_the_same(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_sample", lambda *_: SAMPLE)
    monkeypatch.setattr(measuring, "measure_acceptance", lambda *_: DRAFTS)
    page = tmp_path / "demo.html"
    result = run(page, *models)
    assert result.exit_code == 0, result.output
    text, said = page.read_text(encoding="utf-8"), " ".join(result.stdout.split())
    for label in ("tokens", "pages found in fast memory", "attention on the picture"):
        (told,) = re.findall(rf'"row">{label}</th><td>([^<]+)', text)
        assert html.unescape(told) in said
    (moved,) = re.findall(r"\d+ of \d+ pages outside of fast memory at most, [0-9.]+ MB", text)
    assert moved in said
    assert f"what the picture really shows: {bundled().shows}" in said
    assert "right in every order" not in text, "only one was asked"
    assert "3 questions of four options, in one order of their options" in text
    assert "95 %: 1.20 to 1.40" in text
    assert "In bfloat16 a forward of several tokens rounds otherwise" in text


SAMPLE = {"questions": 3, "rows": 3, "orders": 1, "vanilla": 2 / 3, "circular": None}
SAMPLE |= {"by_category": {"left_right": {"questions": 3, "vanilla": 2 / 3, "circular": None}}}
DRAFTS = {
    "model": "m",
    "drafter": "ngram",
    "dtype": "bfloat16",
    "prompts": 6,
    "identical": 5,
    "tau": 1.3,
}
DRAFTS |= {"tau_interval": (1.2, 1.4), "accepted_by_position": [0.3], "draft_acceptance_rate": 0.1}
DRAFTS |= {"tokens_per_s": 9.0, "plain_tokens_per_s": 10.0, "speedup": 0.9}


def test_what_a_picture_of_ones_own_shows_is_not_claimed(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_sample", lambda *_: SAMPLE)
    monkeypatch.setattr(measuring, "measure_acceptance", lambda *_: DRAFTS)
    page = tmp_path / "demo.html"
    got = result_of(run(page, *models, "--picture", str(demo_file("picture.jpg")), "--json"))
    answer = got["parts"]["answer"]
    assert answer["question"] == "Describe the picture."
    assert (answer["shows"], answer["is_right"]) == (None, None)
    assert "really shows" not in page.read_text(encoding="utf-8")


def test_the_prompts_forward_is_told_apart() -> None:
    told = forwards({"tokens": 22, "arrivals": [1, *[2] * 9, 1, 1, 1]})
    assert told == "22 tokens: 1 by the prompt's forward, 21 in 12 forwards after it = 1.75 tokens a forward"  # fmt: skip
    assert forwards({"tokens": 1, "arrivals": [1]}) == "1 tokens: 1 by the prompt's forward"


def test_special_tokens_are_quiet_tags() -> None:
    drawn = "<code>&lt;|im_start|&gt;user &lt;b|&gt; &lt;||&gt;</code>"
    tag = '<span class="tag">im_start</span>'
    assert quiet_tags(drawn) == f"<code>{tag}user &lt;b|&gt; &lt;||&gt;</code>"


def test_answers_are_the_same_but_for_articles() -> None:
    assert says_the_same("The picture shows a red ship.", "the picture shows red ship.")
    assert not says_the_same("The picture shows a ship.", "The picture shows a ship on it.")


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


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--html", "no/a.html", "html: no folder"),
        ("--html", ".", "html: got {folder}, a folder"),
        ("--html", "photo.png", "html: got {folder}/photo.png, which is the picture"),
        ("--picture", "none.png", "picture: no file"),
        ("--picture", "page.html", "picture: got {folder}/page.html: the image cannot be read"),
        ("--picture", ".", "picture: no file"),
        ("--vision-model", "nosuch", "vision-model: 'nosuch' is no model"),
        ("--vision-model", "smol-lava", "did you mean 'smol-llava'?"),
        ("--vision-model", "smol", "vision-model: got 'smol', which is of another kind"),
        ("--text-model", "smoll", "text-model: unknown model 'smoll': did you mean 'smol'?"),
        ("--text-model", "dinov2-small", "text-model: got 'dinov2-small'"),
        ("--text-model", "./none", "text-model: no such model folder: ./none"),
    ],
)
def test_what_cannot_work_is_told_before_anything_runs(
    option: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(demo_run, "run_demo", never)
    (tmp_path / "page.html").write_text("<p>no picture", encoding="utf-8")
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    is_path = option in ("--html", "--picture")
    given = {"--html": tmp_path / "a.html", "--picture": tmp_path / "photo.png"}
    given |= {option: tmp_path / value if is_path else value}
    words = [str(word) for pair in given.items() for word in pair]
    result = CliRunner().invoke(create_app(), ["demo", *words])
    assert result.exit_code == 2, result.output
    assert told.format(folder=tmp_path) in " ".join(result.stderr.split())
    assert "Allowed:" in result.stderr


def test_a_model_without_eyes_is_told_before_anything_runs(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run(tmp_path / "a.html", models[0], models[0])
    assert result.exit_code == 2
    assert "sees no images" in result.stderr
    assert "building" not in result.stderr


def test_what_ships_is_whole_and_small() -> None:
    files = [demo_file(name) for name in ("LICENSE.txt", "mmbench_sample.tsv", "notes.txt", "picture.jpg", "picture.json", "prompts.jsonl")]  # fmt: skip
    assert sum(path.stat().st_size for path in files) < 300_000
    table = read_mmbench(files[1], strict=True)
    letters = [question.answer for question in table.questions]
    assert len(letters) >= 12
    assert max(map(letters.count, "ABCD")) - min(map(letters.count, "ABCD")) <= 1
    for question in table.questions:
        assert len(set(question.options.values())) == 4
        assert table.pictures.load(question.pictures[0]).size == (168, 168)
    assert read_picture(files[3]).size == (336, 336)
    assert "Apache License" in files[0].read_text(encoding="utf-8")
    own = bundled()
    assert own.answer == f"The picture shows {own.shows}."
    first = [question.category for question in table.questions[:5]]
    assert len(set(first)) == 5, "--quick asks one question of each sort"

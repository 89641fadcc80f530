"""benchmarks/image_budgets.py on a tiny LLaVA: rows, a second start, two processes, sums by hand, and the tables."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_llava
import tiny_models
from transformers import AutoConfig

from oval_core.errors import ConfigError
from oval_mm.fusion_checkpoint import TrainedFusion, save_fusion
from oval_mm.fusion_router import FusionConfig, FusionRouter
from oval_mm.mmbench import Question

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCHMARKS))
    names = ("image_budgets", "image_budget_rows", "image_figures")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("budgets")
    tables = {"scenes": 1, "albums": 3}
    for name, count in tables.items():
        columns = ["index", "question", "A", "B", "answer", "category", "image"]
        with (folder / f"{name}.tsv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, delimiter="\t", lineterminator="\n")
            writer.writeheader()
            for index in range(4):
                pictures = [tiny_llava.png_text(10 * index + own) for own in range(count)]
                cells = {"A": "cat", "B": "dog", "answer": "AB"[index % 2], "category": "xy"[index // 2]}  # fmt: skip
                shown = pictures[0] if count == 1 else str(pictures)
                writer.writerow({"index": index, "question": f"What {index}?", **cells, "image": shown})  # fmt: skip
    llava = tiny_llava.save_llava(folder / "llava", num_hidden_layers=3)
    size = AutoConfig.from_pretrained(llava).text_config.hidden_size
    router = FusionRouter(FusionConfig(hidden_size=size, size=16))
    save_fusion(folder / "router", TrainedFusion(router=router))
    return SimpleNamespace(folder=folder, llava=llava, router=folder / "router")


def arguments(tiny: SimpleNamespace, out: Path, *more: object) -> list[str]:
    data = [part for name in ("scenes", "albums") for part in ("--data", tiny.folder / f"{name}.tsv")]  # fmt: skip
    flags = ["--model", tiny.llava, *data, "--out", out, "--dtype", "float32", "--tile", 1, "--questions", 1]  # fmt: skip
    return [str(part) for part in (*flags, *more)]


def run(bench: SimpleNamespace, capsys: Any, argv: list[str]) -> dict[str, Any]:
    bench.image_budgets.main(argv)
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_every_setting_is_asked_once_and_the_record_becomes_a_table(
    bench: SimpleNamespace, tiny: SimpleNamespace, tmp_path: Path, capsys: Any
) -> None:
    routers = (
        "--routers",
        f"fusion={tiny.router},random,uniform,downsample",
        "--budgets",
        "50%,33%",
    )
    first = run(bench, capsys, arguments(tiny, tmp_path, *routers, "--part", "1/2"))
    assert not first["whole"]
    second = run(bench, capsys, arguments(tiny, tmp_path, *routers, "--part", "2/2"))
    assert second["whole"]
    lines = [json.loads(line) for path in tmp_path.glob("rows-*.jsonl") for line in path.read_text().splitlines()]  # fmt: skip
    assert len(lines) == 4 * (1 + 2 * 4)  # 2 tables x 2 tasks x 1 question
    assert len({(line["unit"], line["setting"]) for line in lines}) == len(lines)
    assert {line["unit"] % 2 for line in lines if "@" in line["setting"]} == {0, 1}
    again = run(bench, capsys, arguments(tiny, tmp_path, *routers))
    assert again["tables"] == second["tables"], "nothing is left to ask"
    by_name = {table["name"]: table for table in again["tables"]}
    assert {name: own["image_tokens"] for name, own in by_name.items()} == {"scenes": 4, "albums": 12}  # fmt: skip
    for table in again["tables"]:
        rows = {(row["router"], row["budget"]): row for row in table["rows"]}
        assert rows["dense", 1.0]["ratio"] == 1
        assert rows["dense", 1.0]["read_share"] == rows["downsample", 0.5]["read_share"] == 1
        assert rows["fusion", 0.5]["read_share"] == 0.5
        assert rows["fusion", 0.33]["router_share"] > 0
        assert set(rows["fusion", 0.33]["against"]) == {"dense", "random", "uniform", "downsample"}
    page = bench.image_figures.render_image_budgets(again)
    assert page.count("| 33% | fusion |") == 2
    assert str(tiny.folder) not in json.dumps(again)
    with pytest.raises(ConfigError, match="other prompts"):
        run(bench, capsys, arguments(tiny, tmp_path, *routers, "--max-new-tokens", 2))


def test_circular_asks_every_order(
    bench: SimpleNamespace, tiny: SimpleNamespace, tmp_path: Path, capsys: Any
) -> None:
    flags = ("--routers", "uniform", "--budgets", "50%", "--circular")
    found = run(bench, capsys, arguments(tiny, tmp_path, *flags))
    table = found["tables"][0]
    assert (table["questions"], table["asked"]) == (2, 4)
    assert all(0 <= row["circular"] <= row["accuracy"] for row in table["rows"])


def test_decoding_at_the_whole_budget_is_dense(
    bench: SimpleNamespace, tiny: SimpleNamespace, tmp_path: Path, capsys: Any
) -> None:
    flags = ("--decode", "--shares", "20%,100%", "--new-tokens", "6", "--decode-router", "sketch")
    found = run(bench, capsys, arguments(tiny, tmp_path, *flags))
    full, few, whole = found["rows"]
    assert (full["recall"], full["agreement"], full["ratio"]) == (pytest.approx(1), 1, 1)
    assert whole["recall"] == pytest.approx(1, abs=1e-5)
    assert (whole["agreement"], whole["identical"]) == (1, found["albums"])
    assert few["recall"] <= whole["recall"] + 1e-5
    assert "| routed | 20% |" in bench.image_figures.render_image_decode(found)


def rows_by_hand(bench: SimpleNamespace) -> tuple[Any, Any, Any]:
    rows = bench.image_budget_rows
    dense, half = rows.Setting(router="dense"), rows.Setting(router="uniform", budget=0.33)
    asked, found = [], {}
    for unit in range(10):
        question = Question(line=unit, index=unit, group=unit, question="q", hint=None, options={"A": "a"}, answer="A", category="t", l2_category="", split="", pictures=("p", "r"))  # fmt: skip
        asked.append(rows.Asked(unit=unit, table="albums", question=question))
        for setting, hit, ms in ((dense, unit < 8, 100 + unit), (half, 1 <= unit < 9, 50)):
            found[unit, setting.key] = rows.AnswerRow(
                unit=unit, setting=setting.key, answer="A", hit=hit, reason=None, ms=ms, router_ms=5, image_tokens=10, image_tokens_read=3,
            )  # fmt: skip
    return asked, [dense, half], found


def test_sums_by_hand(bench: SimpleNamespace) -> None:
    asked, settings, found = rows_by_hand(bench)
    table = bench.image_budget_rows.summarise(asked, settings, found)[0]
    row = table["rows"][1]
    assert (row["accuracy"], row["relative"]) == (0.8, 1.0)
    assert row["relative_interval"][0] < 1 < row["relative_interval"][1]
    against = row["against"]["dense"]
    assert (against["only_first"], against["only_second"], against["p_value"]) == (1, 1, 1)
    assert (row["ms"], row["router_share"]) == (50, 0.1)
    assert row["ratio"] == pytest.approx(50 / 104.5, rel=0.01)
    del found[3, settings[1].key]
    table = bench.image_budget_rows.summarise(asked, settings, found)[0]
    assert (table["questions"], table["left_out"]) == (9, 1)


def test_the_text_says_what_the_numbers_say(bench: SimpleNamespace) -> None:
    asked, settings, found = rows_by_hand(bench)
    tables = bench.image_budget_rows.summarise(asked, settings, found)
    result = {"tables": tables, "routers": {"uniform": "uniform"}}
    text = bench.image_figures.render_image_budgets(result)
    assert "keeps 100.0% of dense's accuracy" in text
    assert "the target of 99% is kept, by its interval not certain." in text
    assert "times as fast as dense: the target of 1.27 is met" in text
    row = tables[0]["rows"][1]
    row["relative"], row["relative_interval"], row["ratio"] = 0.9, [0.8, 0.98], 0.9
    text = bench.image_figures.render_image_budgets(result)
    assert "is missed, also by its interval" in text
    assert "1.11 times as fast as dense: the target of 1.27 is missed" in text

"""What is made of measured rows: totals against sums by hand, the page, rows on disk."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from oval_adapters.cli.sides_options import SidesOptions
from oval_adapters.evaluation import totals as figures
from oval_adapters.evaluation.decode import difference
from oval_adapters.evaluation.kept_rows import KeptRows
from oval_adapters.evaluation.page import render_page
from oval_adapters.evaluation.ranks import Ranks, ranks, started_alone
from oval_adapters.evaluation.report import AcceptanceReport, make_report
from oval_adapters.evaluation.rows import Parting, Row, SideRow
from oval_adapters.evaluation.samples import make_samples, pieces
from oval_adapters.evaluation.settings import AcceptanceSettings, Side, parse_sides
from oval_adapters.evaluation.tables import notes
from oval_adapters.evaluation.totals import totals
from oval_adapters.evaluation.units import Unit, stamp_of
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_spec.acceptance import AcceptanceCounters

EVIL = '<script>alert("x")</script>&'


def counted(*steps: tuple[int, int, int]) -> AcceptanceCounters:
    counters = AcceptanceCounters()
    for drafted, accepted, emitted in steps:
        counters.record(drafted=drafted, accepted=accepted, emitted=emitted)
    return counters


def side(num_tokens: int, prompt_s: float, decode_s: float, **more: Any) -> SideRow:
    ids = (tuple(range(10, 10 + num_tokens)),)
    return SideRow(ids=ids, prompt_s=prompt_s, decode_s=decode_s, **{"partings": (None,), **more})


@pytest.fixture
def rows() -> list[Row]:
    """Two prompts: the first is drafted well, the second is not, and its text parts."""
    good, bad = counted((6, 2, 3), (6, 1, 2), (6, 0, 1)), counted((6, 0, 1), (6, 1, 1))
    tiers = {"asked": 10, "found": 9, "stall_s": 0.5, "transfer_s": 2.0}
    first = {
        "plain": side(7, 1.0, 6.0),
        "ngram": side(7, 1.0, 3.0, counts=good, arrivals=(1, 3, 2, 1), tiers=tiers),
    }
    second = {
        "plain": side(3, 1.0, 2.0),
        "ngram": side(3, 2.0, 4.0, counts=bad, arrivals=(1, 1, 1), partings=(Parting(step=2, margin=-0.125),)),
    }  # fmt: skip
    return [
        Row(unit=0, category="qa", names=(EVIL,), prompt_tokens=(5,), sides=first),
        Row(unit=1, category="rag", names=("b",), prompt_tokens=(9,), sides=second),
    ]


def test_totals_are_the_sums_by_hand(rows: list[Row]) -> None:
    found = totals(rows, "ngram")
    assert (found.prompts, found.identical, found.steps, found.new_tokens) == (2, 1, 5, 10)
    assert found.tau == pytest.approx(8 / 5)
    assert found.tau_p50 == pytest.approx((2 + 1) / 2)
    # position 1: of five steps two in the first prompt, and the cut one of the second
    assert found.accepted_by_position == pytest.approx((3 / 5, 1 / 5))
    assert found.draft_acceptance_rate == pytest.approx(4 / 30)
    assert found.drafted_per_step == 6
    assert found.tokens_per_s == pytest.approx(8 / 7)
    assert found.plain_tokens_per_s == pytest.approx(8 / 8)
    assert found.speedup == pytest.approx(8 / 7)
    assert found.speedup_p50 == pytest.approx((2 + 0.5) / 2)
    assert found.whole_speedup == pytest.approx((10 / 10) / (10 / 10))
    assert found.mean_speedup == pytest.approx((7 / 4 + 3 / 6) / (7 / 7 + 3 / 3))
    assert (found.page_hit_rate, found.stall_s, found.stall_hidden) == (0.9, 0.5, 0.75)
    (parted,) = found.partings
    assert (parted.name, parted.category, parted.step, parted.margin) == ("b", "rag", 2, -0.125)


def test_plain_decoding_has_no_figures_of_drafts(rows: list[Row]) -> None:
    found = totals(rows, "plain")
    assert (found.tau, found.accepted_by_position, found.steps, found.page_hit_rate) == (None,) * 4
    assert (found.identical, found.speedup, found.mean_speedup) == (2, 1, 1)


def test_intervals_hold_the_figure_and_vanish_with_one_unit(rows: list[Row]) -> None:
    many = [replace(row, unit=i) for i, row in enumerate(rows * 20)]
    found = totals(many, "ngram")
    for value, interval in ((found.tau, found.tau_interval), (found.speedup, found.speedup_interval)):  # fmt: skip
        assert interval is not None
        assert interval[0] < value < interval[1]
        assert interval[0] > 0.5  # the worse of the two units alone
        assert interval[1] < 2.0  # the better one
    assert found.tau_interval == totals(many, "ngram").tau_interval
    assert totals(rows[:1], "ngram").tau_interval is None
    same = totals([rows[0]] * 4, "ngram")
    assert same.tau_interval == pytest.approx((same.tau, same.tau))


def test_sampled_texts_are_not_compared(rows: list[Row]) -> None:
    sampled = [
        replace(row, sides={label: replace(own, partings=()) for label, own in row.sides.items()})
        for row in rows
    ]
    assert totals(sampled, "ngram").identical is None


def test_figures_that_do_not_exist_are_none() -> None:
    nothing = side(1, 1.0, 0.0, counts=AcceptanceCounters())
    row = Row(unit=0, category="a", names=("a",), prompt_tokens=(3,), sides={"plain": side(1, 1.0, 0.0), "ngram": nothing})  # fmt: skip
    found = totals([row], "ngram")
    assert (found.tau, found.tokens_per_s, found.speedup, found.draft_acceptance_rate) == (
        None,
    ) * 4
    assert figures.pooled([None, AcceptanceCounters()]) is None


def test_the_difference_of_two_readings() -> None:
    before, after = counted((4, 2, 3)), counted((4, 2, 3), (6, 3, 4), (5, 0, 1))
    assert difference(after, before) == AcceptanceCounters(11, [1, 1, 1], [0, 1, 0, 0, 1])
    assert difference(after, after) == AcceptanceCounters()
    assert difference(counted((4, 2, 3), (2, 0, 1)), before) == AcceptanceCounters(2, [], [0, 1])


def test_rows_survive_the_disk_and_a_torn_line(rows: list[Row], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    kept = KeptRows(folder, "stamp", resume=False)
    assert kept.read() == []
    kept.open()
    for row in reversed(rows):
        kept.add(row)
    assert KeptRows(folder, "stamp", resume=True).read() == rows
    other = KeptRows(folder, "stamp", resume=True, rank=1)
    other.open()
    other.add(replace(rows[0], unit=7))
    path = folder / "rows-0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # a crash in the middle of a line
    again = KeptRows(folder, "stamp", resume=True)
    assert [row.unit for row in again.read()] == [1, 7]
    again.open()
    again.add(rows[0])
    assert [row.unit for row in again.read()] == [0, 1, 7]
    assert again.read()[0] == rows[0]


def test_a_folder_of_another_run_is_refused(rows: list[Row], tmp_path: Path) -> None:
    KeptRows(tmp_path, "stamp", resume=False).open()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        KeptRows(tmp_path, "stamp", resume=False)
    with pytest.raises(ConfigError, match="other prompts or settings"):
        KeptRows(tmp_path, "other", resume=True)
    made = KeptRows(tmp_path, "stamp", resume=True, settings={"a": {"b": (1,), "c": 2}, "d": 3})
    made.open({"dtype": "float32"})
    same = {"a": {"b": (1,), "c": 2}, "d": 3}
    for settings, told in (
        ({"a": {"b": (1,), "c": 5}, "e": 3}, r"\(a\.c 2 there, 5 here; d 3 there, None here; e None there, 3 here\)"),
        (same, r"\(the prompts differ, not the settings\)"),
        ({}, "other prompts or settings. Allowed"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            KeptRows(tmp_path, "other", resume=True, settings=settings)
    assert KeptRows(tmp_path, "stamp", resume=True, settings=same).facts == {"dtype": "float32"}
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        KeptRows(tmp_path, "stamp", resume=True)
    with pytest.raises(ConfigError, match="a file"):
        KeptRows(tmp_path / "run.json", "stamp", resume=False)


def test_a_stamp_tells_runs_apart() -> None:
    unit = Unit(number=0, category="a", names=("1",), prompts=((5, 6),))
    stamps = {
        stamp_of({"max_new_tokens": 4}, [unit]),
        stamp_of({"max_new_tokens": 5}, [unit]),
        stamp_of({"max_new_tokens": 4}, [replace(unit, prompts=((5, 7),))]),
        stamp_of({"max_new_tokens": 4}, [replace(unit, names=("2",))]),
    }
    assert len(stamps) == 4


def test_units_are_padded_on_the_left() -> None:
    unit = Unit(number=0, category="a", names=("1", "2"), prompts=((5, 6, 7), (8,)))
    inputs = unit.inputs(9, torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A token a byte."""
    folder = tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), None)
    return AutoTokenizer.from_pretrained(folder)


def test_pieces_say_how_tokens_came(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("abcdef").input_ids
    found = pieces(tokenizer, ids, (1, 3, 2))
    assert [(p.text, p.origin, p.step) for p in found] == [
        ("a", "prompt", 0),
        ("b", "drafted", 1),
        ("c", "drafted", 1),
        ("d", "bonus", 1),
        ("e", "drafted", 2),
        ("f", "bonus", 2),
    ]


def test_parts_of_a_letter_wait_for_the_rest(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("aé€b").input_ids
    assert len(ids) == 7
    found = pieces(tokenizer, ids, (1, 1, 1, 1, 1, 1, 1))
    assert [(p.text, p.step) for p in found] == [("a", 0), ("é", 1), ("€", 3), ("b", 6)]
    cut = pieces(
        tokenizer, ids[:-2], (1, 4)
    )  # ends inside a letter: shown as it is, nothing is lost
    assert "".join(p.text for p in cut) == tokenizer.decode(ids[:-2])


class Outline(HTMLParser):
    """Tags that are open, texts, and what points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.points: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.points += [name for name, _ in attrs if name in ("src", "href", "action", "onclick")]
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report_of(rows: list[Row], **more: Any) -> AcceptanceReport:
    settings = AcceptanceSettings(model=EVIL, prompts="/a/b.jsonl", sides=(Side(label="ngram", settings={}),))  # fmt: skip
    model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    oval: Any = SimpleNamespace(model=model, backend="torch")
    given = {"whole": True, "skipped": (), "num_later_turns": 0, "processes": 1, "tiers": None}
    return make_report(settings, rows, oval, **{**given, **more})


def test_the_page_stands_alone_and_escapes(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:  # fmt: skip
    ids = tuple(tokenizer("<b>&amp").input_ids[:7])
    sides = {label: replace(own, ids=(ids,)) for label, own in rows[0].sides.items()}
    report = report_of([replace(rows[0], sides=sides), rows[1]])
    page = render_page(report, make_samples(tokenizer, report.rows, "ngram"))
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert {"script", "link", "img", "iframe", "b"}.isdisjoint(outline.tags)
    assert outline.points == []
    assert re.search(r"https?:|url\(|@import", page) is None
    text = "".join(outline.texts)
    assert EVIL in text
    assert "<b>&amp" in text
    for needed in ("prefers-color-scheme: dark", "1.60", "ngram", "rag", "part from plain"):
        assert needed in page or needed in text


def test_the_json_has_the_main_drafter_on_top(rows: list[Row]) -> None:
    report = report_of(rows, num_later_turns=3)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    keys = ("prompts", "identical", "tau", "tau_by_category", "accepted_by_position", "draft_acceptance_rate", "tokens_per_s", "plain_tokens_per_s", "speedup", "page_hit_rate", "stall_s")  # fmt: skip
    assert set(keys) <= set(values)
    assert values["tau_by_category"] == {"qa": 2.0, "rag": 1.0}
    assert (values["drafter"], values["drafters"], set(values["baselines"])) == ("ngram", {}, {"plain"})  # fmt: skip
    assert set(keys) <= set(values["baselines"]["plain"])
    assert values["later_turns_not_asked"] == 3
    assert values["settings"]["prompts"] == "b.jsonl"  # its name, no place of this machine
    assert {"tau", "speedup", "page_hit_rate"} <= set(values["definitions"])
    said = " ".join(notes(report))
    assert "3 later turns" in said
    assert (
        "1 texts part from plain decoding's, the first at token 2; widest margin there 0.125"
        in said
    )


def test_sides_as_they_are_typed() -> None:
    sides = parse_sides(
        "hybrid, ngram:depth=7:turns_off=true", {"max_nodes": 15, "turns_off": False}
    )
    assert [s.label for s in sides] == ["hybrid", "ngram:depth=7:turns_off=true"]
    assert sides[0].settings == {"drafter": "hybrid", "max_nodes": 15, "turns_off": False}
    assert sides[1].settings == {"drafter": "ngram", "max_nodes": 15, "turns_off": True, "depth": 7}
    (draft, ngram) = parse_sides("draft,ngram", {"draft_model": "smol"})
    assert (draft.settings or {})["draft_model"] == "smol"
    assert "draft_model" not in (ngram.settings or {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hybird", "did you mean 'hybrid'"),
        ("ngram,ngram", "named twice"),
        ("ngram:dept=3", "speculation.dept"),
        ("ngram:depth", "SETTING=VALUE"),
        ("ngram:drafter=self", "SETTING=VALUE"),
        ("ngram:depth=[", "cannot be read"),
        ("ngram:depth=0", "Allowed: a whole number"),
        ("", "got ''"),
        ("draft", "draft_model"),
    ],
)
def test_sides_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_sides(text, {})


def test_flags_lie_over_the_speculation_of_a_configuration() -> None:
    config = OvalConfig(speculation={"drafter": "hybrid", "max_nodes": 7, "depth": 3})
    options = SidesOptions(spec="ngram,medusa:depth=9", max_nodes=15, heads="builtin", typical=True)
    ngram, medusa = (side.settings or {} for side in options.sides(config))
    assert (ngram["drafter"], ngram["max_nodes"], ngram["depth"]) == ("ngram", 15, 3)
    assert (medusa["heads"], medusa["verification"], medusa["depth"]) == ("auto", "typical", 9)
    assert (
        ngram["turns_off"],
        SidesOptions(turns_off=True).sides(config)[0].settings["turns_off"],
    ) == (False, True)
    assert [side.label for side in SidesOptions().sides(OvalConfig())] == [
        "hybrid",
        "medusa",
        "ngram",
    ]


def test_one_process_where_two_were_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    assert not started_alone()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert started_alone()
    with ranks() as us:
        assert (us.index, us.count, us.gather([1])) == (0, 1, [1])
    monkeypatch.setenv("RANK", "0")
    assert not started_alone()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: got 'two'"), ranks():
        raise AssertionError("not reached")


def test_shares_of_processes_are_all_units() -> None:
    units = list(range(7))
    shares = [Ranks(index, 3).share(units) for index in range(3)]
    assert sorted(unit for share in shares for unit in share) == units
    assert [len(share) for share in shares] == [3, 2, 2]

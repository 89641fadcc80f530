"""Figures: circular, vanilla and by category against counting by hand, failed rows, and the report in VLMEvalKit's form."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_mm import circular_slowly

from oval_mm.mmbench import PASS_STEP, Question
from oval_mm.mmbench_report import Share, Verdict, figures, judge, table


def question(index: int, **changes: object) -> Question:
    values = {
        "line": 2,
        "index": index,
        "group": index % PASS_STEP,
        "question": "What?",
        "hint": None,
        "options": {"A": "cat", "B": "dog"},
        "answer": "A",
        "category": "ocr",
        "l2_category": "coarse_perception",
        "split": "dev",
        "pictures": ("x",),
    }
    return Question(**{**values, **changes})


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans(), st.booleans()),
    max_size=14,
    unique_by=lambda row: row[:2],
)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_equals_counting_by_hand(rows: list[tuple[int, int, bool, bool]]) -> None:
    """Rows that failed are as if they were not there."""
    verdicts = [
        judge(question(base + step * PASS_STEP), None if failed else "A" if hit else "B")
        for base, step, hit, failed in rows
    ]
    there = [(base + step * PASS_STEP, hit) for base, step, hit, failed in rows if not failed]
    found = figures(verdicts, circular=True)
    hits, questions = circular_slowly(there)
    share = found.circular
    assert (share.hits, share.questions) if share else (hits, questions) == (0, 0)
    bases = [hit for index, hit in there if index < PASS_STEP]
    assert found.vanilla == (Share(hits=sum(bases), questions=len(bases)) if bases else None)
    assert found.vanilla_all == (Share(hits=sum(h for _, h in there), questions=len(there)) if there else None)  # fmt: skip
    assert figures(verdicts, circular=False).circular is None


def test_the_verdict_tells_letter_and_rule() -> None:
    asked = question(1)
    assert judge(asked, "A.") == Verdict(question=asked, answer="A.", letter="A", rule="letter", hit=True)  # fmt: skip
    wrong = judge(asked, "well")
    assert (wrong.letter, wrong.rule, wrong.hit) == ("Z", "nothing", False)
    assert judge(asked, "it is a cat").hit
    assert not judge(asked, "it is a cat", strict=True).hit
    failed = judge(asked, None)
    assert (failed.letter, failed.rule, failed.hit) == ("Z", "failed", False)
    assert judge(question(1, answer=None), "A").hit is None


def test_strictly_what_failed_or_lacks_an_order_is_wrong() -> None:
    verdicts = [
        judge(question(1), "A", strict=True),
        judge(question(PASS_STEP + 1), "A", strict=True),
        judge(question(2), "A", strict=True),  # its other order is not there
        judge(question(3), "A", strict=True),
        judge(question(PASS_STEP + 3), None, strict=True),
        judge(question(4), None, strict=True),
        judge(question(PASS_STEP + 4), "A", strict=True),
    ]
    loose = figures(verdicts, circular=True)
    assert (loose.circular, loose.vanilla) == (Share(hits=3, questions=3), Share(hits=3, questions=3))  # fmt: skip
    assert loose.incomplete == 2
    strict = figures(verdicts, circular=True, strict=True)
    assert (strict.circular, strict.vanilla) == (Share(hits=1, questions=4), Share(hits=3, questions=4))  # fmt: skip
    assert strict.incomplete == 3
    assert [row["Overall"] for row in table(verdicts, circular=True, strict=True)] == [0.25]


def test_by_category_and_in_the_kits_form() -> None:
    verdicts = [
        judge(question(1), "A"),
        judge(question(PASS_STEP + 1), "B"),
        judge(question(2, category="image_scene"), "A"),
        judge(question(PASS_STEP + 2, category="image_scene"), "A"),
        judge(question(3, category="own", l2_category="own wide", split="test"), "A"),
    ]
    found = figures(verdicts, circular=True).to_dict()
    assert found["by_category"] == {
        "image_scene": {"questions": 1, "vanilla": 1.0, "circular": 1.0, "vanilla_all": 1.0},
        "ocr": {"questions": 1, "vanilla": 1.0, "circular": 0.0, "vanilla_all": 0.5},
        "own": {"questions": 1, "vanilla": 1.0, "circular": 1.0, "vanilla_all": 1.0},
    }
    assert found["rules"] == {"letter": 5}
    assert table(verdicts, circular=True) == [
        {"split": "dev", "Overall": 0.5, "CP": 0.5, "own wide": None, "image_scene": 1.0, "ocr": 0.0, "own": None},
        {"split": "test", "Overall": 1.0, "CP": None, "own wide": 1.0, "image_scene": None, "ocr": None, "own": 1.0},
    ]  # fmt: skip
    (row, _) = table(verdicts, circular=False)
    assert (row["Overall"], row["ocr"]) == (0.75, 0.5)


def test_answers_that_are_not_known_count_nowhere() -> None:
    found = figures([judge(question(1, answer=None), "A")], circular=True)
    assert (found.vanilla, found.circular, found.to_dict()["questions"]) == (None, None, 0)
    assert table([judge(question(1, answer=None), "A")], circular=False) == []


@pytest.mark.parametrize("hits", [0, 3, 10])
def test_the_interval_is_wilsons(hits: int) -> None:
    """Its ends are where the share lies just 1.96 standard errors of that end away."""
    share = Share(hits=hits, questions=10)
    for end in share.interval:
        if 0 < end < 1:
            error = math.sqrt(end * (1 - end) / 10)
            assert abs(share.accuracy - end) / error == pytest.approx(1.959964)
    assert (share.interval[0] == 0, share.interval[1] == 1) == (hits == 0, hits == 10)
    assert share.interval[0] <= share.accuracy <= share.interval[1]

"""Short answers: the official form of a text, and soft accuracy against leaving each truth out in turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_mm import soft_accuracy_slowly

from oval_mm.vqa_answers import normalise, score


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("Yes", "yes"),
        (" The Dog.\n", "dog"),
        ("a  cat and an owl", "cat and owl"),
        ("two", "2"),
        ("none", "0"),
        ("Ten zero", "10 0"),
        ("dont", "don't"),
        ("YOURE", "you're"),
        ("couldn'tve", "couldn't've"),
        ("couldntve", "couldntve"),  # two apostrophes are missing: the table has no such word
        ("somebody'd", "somebodyd"),
        ("twas", "'twas"),
        ("let's", "let's"),
        ("t-shirt", "t shirt"),
        ("t- shirt", "t shirt"),
        ("red/blue", "red blue"),
        ("1,000", "1000"),
        ("yes, no", "yes no"),
        ("yes,no", "yes no"),
        ("10:30", "10:30"),
        ("it's", "it's"),
        ("2.5", "2.5"),
        ("2.", "2"),
        ("u.s.a.", "usa"),
        ("what?!", "what"),
        ("$5", "$5"),
        ("one\ttwo", "1 2"),
        ("", ""),
        ("the", ""),
        ("a." * 40, "a" * 33 + ".a" * 7 + "."),  # the official script removes 32 periods
    ],
)
def test_the_official_form(answer: str, normal: str) -> None:
    assert normalise(answer).replace(" ", "_") == normal.replace(" ", "_")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["cat", "dog", "owl"]), min_size=2, max_size=12), st.sampled_from(["cat", "fox"]))  # fmt: skip
def test_soft_accuracy_equals_leaving_each_out(truths: list[str], answer: str) -> None:
    found = score(answer, truths)
    assert found.score == pytest.approx(soft_accuracy_slowly(answer, truths))
    assert (found.rule, found.normal) == ("soft", answer)


@pytest.mark.parametrize(("same", "points"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])  # fmt: skip
def test_the_known_points_of_ten_answers(same: int, points: float) -> None:
    truths = ["The cat!"] * same + [f"x{i}" for i in range(10 - same)]
    assert score("cat", truths).score == pytest.approx(points)


def test_one_truth_is_compared_exactly() -> None:
    assert (score("A cat.", ["cat"]).score, score("A cat.", ["cat"]).rule) == (1.0, "exact")
    assert score("cats", ["cat"]).score == 0

"""Letters of answers: the rules against a slow oracle, the cases that surprise people, and the strict scorer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_mm import infer_slowly

from oval_mm.extraction import RULES, infer, infer_strictly

OPTIONS = {"A": "a dog", "B": "a cat", "C": "two birds"}
TEXT = st.text(alphabet="ABCZ abz.()*\n", min_size=1, max_size=5)
WORDS = st.sampled_from(
    ["A", "B", "C", "E", "Z", "a", "b", "dog", "cat", "the", ".", "(", "A.", "**B**", "C,", "\n", "İ", "\u00a0", "I can't process this file.", "Cannot determine the answer", "Failed to obtain answer via API"]
)  # fmt: skip
ANSWERS = st.one_of(TEXT, st.lists(WORDS, max_size=9).map(" ".join), st.lists(WORDS, max_size=4).map("".join))  # fmt: skip
CHOICES = st.lists(st.one_of(TEXT, WORDS), min_size=1, max_size=5).map(
    lambda texts: dict(zip("ABCDE", texts, strict=False))
)


@settings(max_examples=300, deadline=None)
@given(ANSWERS, CHOICES)
def test_equals_the_slow_oracle(answer: str, options: dict[str, str]) -> None:
    found = infer(answer, options)
    assert found.letter == infer_slowly(answer, options)
    assert found.rule in RULES
    assert (found.letter is None) == (found.rule == "nothing")


@pytest.mark.parametrize(
    ("answer", "letter", "rule"),
    [
        ("B", "B", "letter"),
        (" (B).\n", "B", "letter"),
        ("The answer is B: a cat", "B", "letter"),
        ("**C**", "C", "letter"),
        ("A cat", "A", "letter"),  # A as an article is taken for a letter
        ("B because the image shows a dog", "A", "text"),  # the letter stands too early
        ("A CAT!", "A", "letter"),
        ("one CAT, a cat", "B", "text"),
        ("A or B", None, "nothing"),
        ("<B>", None, "nothing"),
        ("B/C", None, "nothing"),
        ('"B"', None, "nothing"),
        ("b", None, "nothing"),
        ("a cat " + "and so on " * 5, None, "nothing"),
        ("none, so Z", "Z", "none of these"),
        ("I can't process this file. B", "Z", "refusal"),
        ("Failed to obtain answer via API", None, "nothing"),
        ("", None, "nothing"),
    ],
)
def test_known_cases(answer: str, letter: str | None, rule: str) -> None:
    found = infer(answer, OPTIONS)
    assert (found.letter, found.rule) == (letter, rule)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(B).", "B"),
        ("**B**", "B"),
        ('"B"', "B"),
        ("B. a cat", "B"),
        ("(B) A cat.", "B"),
        ("A Cat.", "B"),
        ("two birds", "C"),
        ("B. a dog", None),
        ("b", None),
        ("The answer is B", None),
        ("A or B", None),
        ("A cat and two birds", None),
        ("B because of it", None),
        ("", None),
    ],
)
def test_strictly_only_what_leaves_no_doubt(answer: str, letter: str | None) -> None:
    assert infer_strictly(answer, OPTIONS).letter == letter


def test_strictly_equal_texts_are_no_choice() -> None:
    assert infer_strictly("yes", {"A": "Yes", "B": "yes."}).letter is None
    assert infer_strictly("A. yes", {"A": "Yes", "B": "yes."}).letter == "A"


@settings(max_examples=80, deadline=None)
@given(ANSWERS, CHOICES)
def test_strictly_never_an_option_that_is_not_there(answer: str, options: dict[str, str]) -> None:
    found = infer_strictly(answer, options)
    assert found.letter is None or found.letter in options
    assert found.rule in RULES

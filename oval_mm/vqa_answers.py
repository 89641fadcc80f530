"""Soft accuracy of short answers: texts are brought to one form, then compared with what several people said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FULL_ANSWERS", "Scored", "normalise", "score"]

FULL_ANSWERS = 10
"""Answers a question of VQAv2 has."""

_NEEDED = 3
"""So many other people must have said the same for a full point."""

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MAX_PERIODS = 32
"""The official script removes no more: it hands the flag re.UNICODE over where a count belongs."""

_ARTICLES = frozenset(("a", "an", "the"))
_DIGITS = {"none": "0", "zero": "0"} | {
    word: str(number)
    for number, word in enumerate(
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], 1
    )
}
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's where'd where's
where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll
y'all'd've you'd you'd've you'll you're you've
"""
"""Words that are also known with one of their apostrophes missing."""


def _contractions() -> dict[str, str]:
    missing = {
        word[:place] + word[place + 1 :]: word
        for word in _CONTRACTED.split()
        for place, letter in enumerate(word)
        if letter == "'"
    }
    return missing | {
        "somebody'd": "somebodyd"
    }  # the official table has this one the other way round


_CONTRACTIONS = _contractions()


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one answer.

    Attributes:
        normal: the answer in the form that was compared.
        score: 0..1.
        rule: `soft` over several people's answers, `exact` against the only one.
    """

    normal: str
    score: float
    rule: str


def normalise(answer: str) -> str:
    """Returns an answer in the official form: lower case, digits for number words, no articles, no punctuation."""
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    words = [_DIGITS.get(word, word) for word in _without_punctuation(text).lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def score(answer: str, truths: Sequence[str]) -> Scored:
    """Returns how good an answer is.

    Over several truths: for each of them, a third of a point for each *other* one that says the same, at most one point;
    then the mean. Over one truth that rule gives nothing, so the texts must be equal.

    Args:
        answer: the model's.
        truths: what people said, at least one.
    """
    normal = normalise(answer)
    wanted = [normalise(truth) for truth in truths]
    if len(wanted) == 1:
        return Scored(normal, float(normal == wanted[0]), "exact")
    same = wanted.count(normal)
    if not same:
        return Scored(normal, 0.0, "soft")
    # left out: one that says the same, or one that does not
    own, others = min(1.0, (same - 1) / _NEEDED), min(1.0, same / _NEEDED)
    mean = (same * own + (len(wanted) - same) * others) / len(wanted)
    return Scored(normal, mean, "soft")


def _without_punctuation(text: str) -> str:
    has_number = _COMMA_IN_NUMBER.search(text) is not None
    shown = text
    for mark in _PUNCTUATION:
        at_edge = f"{mark} " in text or f" {mark}" in text
        shown = shown.replace(mark, "" if at_edge or has_number else " ")
    return _PERIOD.sub("", shown, count=_MAX_PERIODS)

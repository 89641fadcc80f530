"""Finds the letter that an answer to a multiple-choice question means, and names the rule that found it.

Two scorers: `infer` follows VLMEvalKit's matching without a judge, rule for rule; `infer_strictly` takes only answers that
leave no doubt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NO_CHOICE", "RULES", "Inferred", "infer", "infer_strictly"]

NO_CHOICE = "Z"
"""Letter of an answer that chooses nothing."""

RULES = {
    "letter": "one option's letter stands as a word among the last four words, and no other letter stands anywhere",
    "text": "no letter was found, and one option's text is part of the answer, which is not over twice as long as all options",
    "none of these": "no option's letter stands as a word, but a Z",
    "refusal": "the answer is a known refusal",
    "exact letter": "the answer is a letter and punctuation, or a letter and its own option's text (strict)",
    "exact text": "the answer is one option's text (strict)",
    "nothing": "no rule found a letter",
    "failed": "the row could not be asked",
}
"""What each rule says."""

_SPACED = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_NO_ANSWER = "Failed to obtain answer via API"
_LAST_WORDS = 4
_AROUND = " \t\r\n.,:;!()[]{}\"'*`"
_LETTER_FIRST = re.compile(r"([A-Z])\s*[.):,\]]\s*(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Inferred:
    """What an answer means.

    Attributes:
        letter: of an option; `NO_CHOICE` for none of them; None where no rule found anything.
        rule: a key of `RULES`.
    """

    letter: str | None
    rule: str


_NOTHING = Inferred(None, "nothing")


def infer(answer: str, options: Mapping[str, str]) -> Inferred:
    """Returns what an answer means, as VLMEvalKit has it without a judge (its release 0.0.20 in `ms-vlmeval`).

    Args:
        answer: the model's.
        options: text by letter.
    """
    return _by_letter(answer, options) or _by_text(answer, options) or _NOTHING


def infer_strictly(answer: str, options: Mapping[str, str]) -> Inferred:
    """Returns what an answer means if it says nothing else: a letter, an option's text, or both of the same option."""
    bare = answer.strip(_AROUND)
    if bare in options:
        return Inferred(bare, "exact letter")
    led = _LETTER_FIRST.fullmatch(answer.strip().lstrip(_AROUND))
    if led is not None and led[1] in options and _same(led[2], options[led[1]]):
        return Inferred(led[1], "exact letter")
    meant = [letter for letter, text in options.items() if _same(answer, text)]
    return Inferred(meant[0], "exact text") if len(meant) == 1 else _NOTHING


def _by_letter(answer: str, options: Mapping[str, str]) -> Inferred | None:
    if _NO_ANSWER in answer:
        return None
    if any(refusal in answer for refusal in _REFUSALS):
        return Inferred(NO_CHOICE, "refusal")
    words = answer.translate(_SPACED).split()
    standing = [letter for letter in options if letter in words]
    if not standing:
        return Inferred(NO_CHOICE, "none of these") if NO_CHOICE in words else None
    if len(standing) > 1 or words.index(standing[0]) < len(words) - _LAST_WORDS:
        return None
    return Inferred(standing[0], "letter")


def _by_text(answer: str, options: Mapping[str, str]) -> Inferred | None:
    lower = answer.lower()
    if len(lower) > 2 * sum(map(len, options.values())):
        return None
    found = [letter for letter, text in options.items() if text.lower() in lower]
    return Inferred(found[0], "text") if len(found) == 1 else None


def _same(answer: str, text: str) -> bool:
    return answer.strip(_AROUND).casefold() == text.strip(_AROUND).casefold()

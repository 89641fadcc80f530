"""Captions of pictures, made plain: what the thing is called, and which things a model is never trained on."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["Caption", "is_held_out", "read_caption"]

MAX_WORDS = 3
MAX_LETTERS = 26
HELD_OUT_SHARE = 0.2
"""Share of the things that are never trained on."""

_ARTICLES = ("a ", "an ", "the ", "some ", "one ", "another ")
_END = re.compile(r"[.,;:!?()\[\]\"\u201c\u201d]")
_PLAIN = re.compile(r"[a-z][a-z'\u2019 -]+")
_SENTENCE = frozenset(["is", "are", "was", "can", "lets", "called", "that", "which", "who", "it", "it's", "this", "these", "used", "has", "have", "the", "your", "our", "my"])  # fmt: skip
_NUMBERS = frozenset(["two", "three", "four", "five", "six", "couple", "pair", "several", "many"])
_JOINTS = frozenset(["of", "with", "in", "on", "from", "for", "and", "at", "wearing", "without"])
_SINGULAR_ENDS = ("ss", "us", "is", "ous")


@dataclass(frozen=True, slots=True)
class Caption:
    """What a picture shows.

    Attributes:
        name: of the thing, without an article, in small letters.
        phrase: the same with its article, if it has one.
        noun: its main word in the singular, which decides whether it is held out.
    """

    name: str
    phrase: str
    noun: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the name, each in the singular."""
        return tuple(_singular(word) for word in self.name.split())


def read_caption(text: str) -> Caption | None:
    """Returns the plain caption that a text begins with; None where that is a sentence, several things, too long, or no words.

    Args:
        text: of the file beside a picture; only its first line counts.
    """
    first = text.strip().splitlines()[:1]
    phrase = _END.split(first[0], maxsplit=1)[0].strip().lower() if first else ""
    phrase = " ".join(phrase.replace("\u2019", "'").split())
    name = phrase
    for article in _ARTICLES:
        if name.startswith(article):
            name = name.removeprefix(article).strip()
            break
    words = name.split()
    if not 2 < len(name) <= MAX_LETTERS or len(words) > MAX_WORDS or not _PLAIN.fullmatch(name):
        return None
    if _SENTENCE & set(words) or words[0] in _NUMBERS or words[-1] in _JOINTS:
        return None
    return Caption(name=name, phrase=_article(phrase, name), noun=_noun(words))


def is_held_out(noun: str, seed: int, share: float = HELD_OUT_SHARE) -> bool:
    """Returns whether things of this noun are never trained on; the same on every machine.

    Args:
        noun: see `Caption`: kinds of one thing ("green apple", "apple") go the same way.
        seed: of the split.
        share: of the nouns.
    """
    digest = hashlib.sha256(f"{seed}/{noun}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _article(phrase: str, name: str) -> str:
    """Returns a phrase for the middle of a sentence."""
    if phrase.startswith(("the ", "one ", "another ")):
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    return phrase


def _noun(words: list[str]) -> str:
    """Returns the last word before "of", "with" ..., in the singular; near enough for English."""
    ends = [place for place, word in enumerate(words) if word in _JOINTS and place]
    return _singular(words[ends[0] - 1 if ends else -1])


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("s") and not word.endswith(_SINGULAR_ENDS):
        if word.endswith("ies"):
            return word[:-3] + "y"
        if word.endswith(("ches", "shes", "xes", "oes")):
            return word[:-2]
        return word[:-1]
    return word

"""Turns text into token ids and places in the text into places of tokens. Knows nothing of passages.

Texts of an exact length are put together from pieces that are tokenised each on its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oval_adapters.texts.passage import Span
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Piece:
    """A tokenised text and the places of some parts of it."""

    ids: list[int]
    spans: tuple[Span, ...] = ()


def encode(tokenizer: PreTrainedTokenizerBase, text: str, parts: Iterable[Span] = ()) -> Piece:
    """Returns the tokens of a text, without any that the tokenizer adds, and the tokens that cover parts of it.

    Args:
        tokenizer: one that says which characters a token stands for.
        text: special tokens written out in it count as such.
        parts: places of characters, none empty.

    Raises:
        ConfigError: the tokenizer does not tell characters.
    """
    ids, starts, ends = encode_with_places(tokenizer, text)
    spans = [(bisect_right(ends, first), bisect_left(starts, last)) for first, last in parts]
    return Piece(ids, tuple(spans))


def encode_with_places(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[int], list[int]]:
    """Returns the tokens of a text, and the first character and one past the last character of each.

    Raises:
        ConfigError: the tokenizer does not tell characters.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer: got {type(tokenizer).__name__}, which cannot tell which characters a token stands for. "
            "Allowed: fast tokenizers. Save it with a tokenizer.json, or choose another model."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    return encoded["input_ids"], [first for first, _ in offsets], [last for _, last in offsets]


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that the tokenizer puts before every text; often one, or none."""
    plain: Sequence[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    return whole[: whole.index(plain[0])]

"""Turns as one text: the model's chat template, or plain `User:` and `Assistant:` lines for a model without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.texts.passage import Span

FILLER = "[[FILLER]]"
"""Stands in the first turn for text that is put there as tokens."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Turns as text, in three parts.

    Attributes:
        head: up to the filler of the first turn.
        middle: from there to the end of the prompt.
        rest: what follows the prompt.
        turns: places in `rest` of the turns that lie in it.
    """

    head: str
    middle: str
    rest: str
    turns: tuple[Span, ...]


def render(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], prompt_turns: int, *, asked: bool
) -> Rendered:
    """Returns turns as the model is to see them.

    Args:
        tokenizer: the model's.
        turns: the user's and the assistant's in alternation, stripped; the first one holds `FILLER` once.
        prompt_turns: turns in the prompt.
        asked: the prompt ends where the assistant is to begin; else right after its last turn.

    Raises:
        ConfigError: the chat template refuses the turns, or leaves one out.
    """
    whole = _template(tokenizer, turns, asked=False)
    prompt = _template(tokenizer, turns[:prompt_turns], asked=asked)
    end = len(commonprefix([whole, prompt]))  # some templates change a turn that is not the last
    places, cursor = [], 0
    for turn in turns:
        first = whole.find(turn, cursor)
        if first < 0:
            raise ConfigError(
                f"chat: the chat template changes the turn {turn[:40]!r}. Allowed: templates that keep every turn as "
                "it is. Give the tokenizer another template."
            )
        cursor = first + len(turn)
        places.append((first, cursor))
    filler = whole.index(FILLER)
    return Rendered(
        head=whole[:filler],
        middle=whole[filler + len(FILLER) : end],
        rest=whole[end:],
        turns=tuple((first - end, last - end) for first, last in places[prompt_turns:]),
    )


def _template(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], *, asked: bool) -> str:
    roles = ("user", "assistant")
    if not tokenizer.chat_template:
        lines = [f"{roles[i % 2].title()}: {turn}\n\n" for i, turn in enumerate(turns)]
        return "".join(lines) + ("Assistant: " if asked else "")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    try:
        rendered: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asked
        )
    except TemplateError as error:
        raise ConfigError(
            f"chat: the chat template refused the turns: {error}. Allowed: templates for user and assistant in "
            "alternation. Give the tokenizer another template."
        ) from error
    return rendered

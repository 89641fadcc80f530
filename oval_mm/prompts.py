"""What a model is asked: the text around a question, in the forms that published figures use. Knows no chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping

from oval_core.errors import ConfigError, did_you_mean

__all__ = ["STYLES", "choice_prompt", "short_answer_prompt"]

STYLES = {
    "llava": "VLMEvalKit's LLaVA class and the LLaVA repository: the letter is asked for",
    "generic": "VLMEvalKit's text for models without one of their own",
}
"""Forms of a multiple-choice question."""

_CHINESE = re.compile("[\u4e00-\u9fff]")
_ASK = "Answer with the option's letter from the given choices directly."
_ASK_CHINESE = "请直接回答选项字母。"


def choice_prompt(question: str, hint: str | None, options: Mapping[str, str], style: str) -> str:
    """Returns the text that asks a multiple-choice question; the image stands before it.

    Args:
        question: as in the file.
        hint: None where there is none.
        options: text by letter.
        style: a key of `STYLES`.

    Raises:
        ConfigError: no such style.
    """
    if style not in STYLES:
        raise ConfigError(f"prompt: got {style!r}; {did_you_mean(style, STYLES)}")
    listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())
    if style == "generic":
        head = "" if hint is None else f"Hint: {hint}\n"
        asked = "Please select the correct answer from the options above. \n"
        return f"{head}Question: {question}\nOptions:\n{listed}\n{asked}"
    head = "" if hint is None else f"{hint}\n"
    text = f"{head}{question}\n{listed}"
    return f"{text}\n{_ASK_CHINESE if _CHINESE.search(text) else _ASK}"


def short_answer_prompt(question: str) -> str:
    """Returns the text that asks for a word or a phrase, as LLaVA's and VLMEvalKit's VQA runs do."""
    return f"{question}\nAnswer the question using a single word or phrase."

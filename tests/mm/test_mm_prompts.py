"""Prompts, letter for letter as published runs ask."""

import pytest

from oval_core.errors import ConfigError
from oval_mm.prompts import choice_prompt, short_answer_prompt

OPTIONS = {"A": "cat", "B": "dog"}


def test_llava() -> None:
    asked = "Answer with the option's letter from the given choices directly."
    assert choice_prompt("What?", None, OPTIONS, "llava") == f"What?\nA. cat\nB. dog\n{asked}"
    assert choice_prompt("What?", "Look.", OPTIONS, "llava").startswith("Look.\nWhat?\nA. cat")
    assert choice_prompt("什么？", None, OPTIONS, "llava").endswith(
        "\nB. dog\n请直接回答选项字母。"
    )


def test_generic() -> None:
    want = "Hint: Look.\nQuestion: What?\nOptions:\nA. cat\nB. dog\nPlease select the correct answer from the options above. \n"
    assert choice_prompt("What?", "Look.", OPTIONS, "generic") == want
    assert choice_prompt("What?", None, OPTIONS, "generic") == want.partition("\n")[2]


def test_short_answers() -> None:
    assert short_answer_prompt("What?") == "What?\nAnswer the question using a single word or phrase."  # fmt: skip


def test_an_unknown_form() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llava'"):
        choice_prompt("What?", None, OPTIONS, "lava")

"""The text around pictures and questions in a small LLaVA: one template for its processor and for its training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from oval_adapters.models.errors import BuildError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IMAGE_TOKEN", "ROLE", "SPARE_TOKEN", "TEMPLATE", "answer_text", "opening", "question_text", "with_image_token"]  # fmt: skip

IMAGE_TOKEN = "<image>"
SPARE_TOKEN = "<empty_output>"
"""A special token that no text uses; it becomes the image token, so the vocabulary does not grow."""

ROLE = "<|im_start|>user\n"
"""What opens a user's turn."""

_END = "<|im_end|>"
_ASSISTANT = "<|im_start|>assistant\n"

TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- set pictures = message['content'] | selectattr('type', 'equalto', 'image') | list | length -%}"
    "{%- set seen = namespace(pictures=0) -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{%- set seen.pictures = seen.pictures + 1 -%}"
    "{%- if pictures > 1 -%}{{ 'Picture ' + seen.pictures | string + ': ' }}{%- endif -%}"
    "{{ '<image>\\n' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""Chat template: pictures are counted where a message has several."""


def opening(pictures: int, tokens: int) -> str:
    """Returns a turn up to its text: the user's role, and each picture as so many image tokens."""
    image = IMAGE_TOKEN * tokens + "\n"
    if pictures == 1:
        return ROLE + image
    return ROLE + "".join(f"Picture {place}: {image}" for place in range(1, pictures + 1))


def question_text(text: str) -> str:
    """Returns the rest of the turn with what opens the answer."""
    return f"{text}{_END}\n{_ASSISTANT}"


def answer_text(text: str) -> str:
    """Returns an answer with what ends it."""
    return text + _END


def with_image_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with its spare token renamed to the image token, and the template.

    Raises:
        BuildError: it has no spare token.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = content["model"]["vocab"], content["added_tokens"]
    spare = [entry for entry in added if entry["content"] == SPARE_TOKEN]
    if SPARE_TOKEN not in vocabulary or len(spare) != 1 or IMAGE_TOKEN in vocabulary:
        raise BuildError(
            f"the tokenizer has no spare token {SPARE_TOKEN!r} to become {IMAGE_TOKEN!r}. Give a SmolLM2 (oval models "
            "build smol)."
        )
    vocabulary[IMAGE_TOKEN] = vocabulary.pop(SPARE_TOKEN)
    spare[0]["content"] = IMAGE_TOKEN
    renamed = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
        additional_special_tokens=[IMAGE_TOKEN],
        model_max_length=tokenizer.model_max_length,
        padding_side="left",
    )
    renamed.chat_template = TEMPLATE
    return renamed

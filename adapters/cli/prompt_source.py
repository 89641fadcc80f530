"""Where the prompt of `oval generate` comes from, and how it becomes token ids."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Source:
    """Where the prompt comes from: exactly one of prompt, chat and file."""

    prompt: str | None
    chat: str | None
    file: str | None
    system: str | None

    def read(self) -> str:
        """Returns the user's text, not yet in any template."""
        from oval_core.errors import ConfigError

        given = [f"--{n}" for n in ("prompt", "chat", "file") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"prompt: got {' and '.join(given) or 'none'}. Allowed: exactly one of --prompt (or a text "
                "without a flag), --chat and --file. Give one."
            )
        if self.system is not None and self.chat is None:
            raise ConfigError(
                f"system: got --system with {given[0]}. Allowed: with --chat. Leave it out."
            )
        text = _read_file(self.file) if self.file is not None else self.prompt or self.chat or ""
        if not text.strip():
            raise ConfigError(f"{given[0]}: got no text. Allowed: any text. Give some.")
        return text

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str, model: str) -> torch.Tensor:
        """Returns the token ids [1, T] of the prompt, the chat template included."""
        from oval_core.errors import ConfigError

        if self.chat is None:
            return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        if not tokenizer.chat_template:
            raise ConfigError(
                f"chat: the tokenizer of {model!r} has no chat template. Allowed: models made for chat. "
                "Use --prompt, with the template written out."
            )
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except TemplateError as error:
            raise ConfigError(
                f"chat: the template of {model!r} refused the messages: {error}. Change --chat or --system."
            ) from error
        return encoded["input_ids"]


def _read_file(name: str) -> str:
    from oval_core.errors import ConfigError

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"file: cannot read {name}: {error.strerror}. Allowed: a readable file, or - for stdin. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"file: {name} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
            "Allowed: UTF-8. Convert it first."
        ) from error

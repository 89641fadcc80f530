"""A checkpoint and a text for tests of commands that read both: small, and with layers left to be routed."""

from __future__ import annotations

import random
from pathlib import Path

import tiny_models
from transformers import AutoTokenizer, PreTrainedModel

_WORDS = ["old", "river", "ran", "past", "seven", "quiet", "mills", "and", "a", "stone", "bridge"]


def save_checkpoint(folder: Path, num_layers: int) -> Path:
    """Saves a tiny Llama of so many layers, and a tokenizer with a token a byte."""
    tiny_models.save_checkpoint(folder, None)
    build(folder, num_layers).save_pretrained(folder)
    return folder


def build(folder: Path, num_layers: int) -> PreTrainedModel:
    """Returns the model of such a checkpoint."""
    size = len(AutoTokenizer.from_pretrained(folder))
    return tiny_models.build("llama", vocab_size=size, num_hidden_layers=num_layers)


def write_text(path: Path, num_sentences: int) -> Path:
    """Writes sentences of random words."""
    rng = random.Random(0)
    sentences = [
        " ".join(rng.choices(_WORDS, k=9)).capitalize() + "." for _ in range(num_sentences)
    ]
    path.write_text(" ".join(sentences), encoding="utf-8")
    return path

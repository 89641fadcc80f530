"""Tiny random models with the real architectures: a family joins the parity tests by one line of `TINY`.

The weights are large enough that greedy text has gaps between its logits and depends on every layer's attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 160
EOS = 3
WINDOW = 12
MAX_POSITIONS = 640
IMAGE_TOKEN = 4
IMAGE_TOKENS = 4
"""Tokens that one image of the tiny LLaVA takes: a 2 x 2 grid of patches."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
}
_WINDOWED = {"sliding_window": WINDOW}
_QWEN_WINDOWED = {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {**_WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 12, "layer_types": _LAYERS}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One tiny model.

    Attributes:
        config: class of its config.
        settings: what differs from the common settings.
        attention: implementation of Hugging Face that computes it fully; soft caps need `eager`.
        window: its sliding window, None where no layer has one.
    """

    config: type[PreTrainedConfig]
    settings: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    window: int | None = None


TINY: dict[str, Tiny] = {
    "llama": Tiny(config=LlamaConfig),
    "mistral": Tiny(config=MistralConfig, settings={"sliding_window": None}),
    "mistral-window": Tiny(config=MistralConfig, settings=_WINDOWED, window=WINDOW),
    "qwen2": Tiny(config=Qwen2Config),
    "qwen2-window": Tiny(config=Qwen2Config, settings=_QWEN_WINDOWED, window=WINDOW),
    "qwen3": Tiny(config=Qwen3Config, settings={"head_dim": 16}),
    "qwen3-window": Tiny(
        config=Qwen3Config, settings={**_QWEN_WINDOWED, "head_dim": 16}, window=WINDOW
    ),
    "phi3": Tiny(config=Phi3Config, settings={"original_max_position_embeddings": MAX_POSITIONS}),
    "phi3-window": Tiny(
        config=Phi3Config,
        settings={**_WINDOWED, "original_max_position_embeddings": MAX_POSITIONS},
        window=WINDOW,
    ),
    "gemma2": Tiny(
        config=Gemma2Config,
        settings={**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
        attention="eager",
        window=WINDOW,
    ),
    "gemma3": Tiny(config=Gemma3TextConfig, settings=_GEMMA, window=WINDOW),
    "llava": Tiny(config=LlavaConfig),
}
"""Name -> facts. Names with `-window` are the same architecture with a window that binds."""

BACKENDS = ("torch", "sdpa", "reference")
"""Attention backends that run on every machine."""


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Builds a tiny model of its own, in evaluation mode and float32.

    Args:
        name: a key of `TINY`.
        seed: seed of its weights.
        **changes: settings of the text config to change.
    """
    tiny = TINY[name]
    torch.manual_seed(seed)
    if tiny.config is LlavaConfig:
        model = _build_llava(changes)
    else:
        config = tiny.config(**{**_COMMON, **tiny.settings, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=tiny.attention)
    model.generation_config.eos_token_id = None  # texts run to their full length unless asked
    model.generation_config.pad_token_id = 0
    return model.eval()


@functools.cache
def shared(name: str, seed: int = 0) -> PreTrainedModel:
    """Returns one model for all tests that leave it as they found it."""
    return build(name, seed)


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Returns random token ids [batch, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (batch, length), generator=generator)


def padded(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `attention_mask` of prompts of these lengths, padded on the left."""
    width = max(lengths)
    ids = prompt(width, len(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pictures(count: int, seed: int = 2) -> torch.Tensor:
    """Returns random images [count, 3, 16, 16] for the tiny LLaVA."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, generator=generator)


def put_image(ids: torch.Tensor, row: int, start: int) -> None:
    """Writes the image tokens of one image into a row, in place."""
    ids[row, start : start + IMAGE_TOKENS] = IMAGE_TOKEN


def one_thread() -> Iterator[None]:
    """Body of a fixture: matrices this small only lose by waiting for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Runs `generate` with a fixed seed; returns everything that it can return, logits included."""
    torch.manual_seed(7)
    kwargs = {
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_logits": True,
        **kwargs,
    }
    return model.generate(*args, **kwargs)


def assert_same_run(got: Any, want: Any) -> None:
    """Checks that two results of `run` hold the same tokens, and logits within 1e-4 at each step."""
    assert got.sequences.tolist() == want.sequences.tolist()
    assert len(got.logits) == len(want.logits)
    for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
        worst = (ours - theirs).abs().max().item()
        assert worst <= 1e-4, f"logits of step {step} differ by {worst}"


def _build_llava(changes: Mapping[str, Any]) -> PreTrainedModel:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        initializer_range=0.25,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**{**_COMMON, **changes}),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration._from_config(config)


def save_checkpoint(folder: Path, template: str | None) -> Path:
    """Saves a tiny Llama and a tokenizer with a token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate(["<pad>", "<s>", "<u>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    build("llama", vocab_size=len(vocab)).save_pretrained(folder)
    return folder

"""A folder of tiny captioned cut-outs, and a tiny random decoder and tower to train a LLaVA of. Needs no network."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from oval_adapters.models.dinov2_onnx import image_settings

SIDE = 28
NAMES = tuple("".join(parts) for parts in itertools.product(("ba", "ke", "mi", "so", "tu"), ("do", "la", "ne", "ri", "vu"), ("ck", "m", "p", "x")))  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>")


def save_cutouts(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Writes a picture and a caption a name: ellipses and squares in different colours, in two folders."""
    for number, name in enumerate(names):
        own = folder / ("round" if number % 2 else "square")
        own.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGBA", (24, 20), (0, 0, 0, 0))
        colour = (number * 53 % 256, number * 97 % 256, number * 151 % 256, 255)
        shape = ImageDraw.Draw(image).ellipse if number % 2 else ImageDraw.Draw(image).rectangle
        shape((2, 2, 21, 17), fill=colour)
        image.save(own / f"{name}.png")
        (own / f"{name}.txt").write_text(f"A {name}.\nMore of it.\n", encoding="utf-8")
    return folder


def save_decoder(folder: Path) -> Path:
    """Writes a tiny Llama whose tokens are bytes, with SmolLM2's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *letters]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<empty_output>"],
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_tower(folder: Path) -> Path:
    """Writes a tiny DINOv2 with its image processor: 2 x 2 patches a picture."""
    torch.manual_seed(2)
    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        use_mask_token=False,
        initializer_range=0.2,
    )
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessorPil(**image_settings(SIDE)).save_pretrained(folder)
    return folder

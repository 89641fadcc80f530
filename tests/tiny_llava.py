"""A tiny random LLaVA on disk, with a processor of its own: a token a byte, 16 x 16 pixels an image. Needs no network."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_models import IMAGE_TOKEN, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}[{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save_llava(folder: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Saves the model and its processor; `changes` are of the text config."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "<u>", "</s>", "<image>", *letters]
    assert words[IMAGE_TOKEN] == "<image>"
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<u>"))  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    processor.save_pretrained(folder)
    settings = {"vocab_size": len(words), "max_position_embeddings": 2048, **changes}
    build("llava", **settings).save_pretrained(folder)
    return folder


def png_text(seed: int, size: tuple[int, int] = (16, 16)) -> str:
    """Returns a picture of noise, rows by columns, as tables of MMBench's form hold it: PNG in base64."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()

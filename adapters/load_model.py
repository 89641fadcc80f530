"""Loads a model for the command line and benchmarks: what the user typed becomes weights on a device, or one clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils import logging

from oval_adapters.families import WRAPPERS
from oval_adapters.models import resolve_model
from oval_core.errors import ConfigError, OvalError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")

_LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


class ModelLoadError(OvalError, RuntimeError):
    """A model or its tokenizer cannot be loaded."""


def resolve_device(name: str) -> torch.device:
    """Returns the device of this name; `auto` is CUDA where there is one.

    Raises:
        ConfigError: no such name, or CUDA was asked for and is absent.
    """
    if name not in DEVICES:
        raise ConfigError(f"device: got {name!r}; {did_you_mean(name, DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: got 'cuda', and torch finds no CUDA device here. Allowed: auto, cpu. Choose one of "
            "them, or mend the driver (oval doctor shows what is found)."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of this name; `auto` is bfloat16 where the device computes in it.

    Raises:
        ConfigError: no such name.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype: got {name!r}; {did_you_mean(name, DTYPES)}")
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def load_config_of(model: str) -> PretrainedConfig:
    """Returns the Hugging Face config of an embedded model, a folder or a hub id.

    Raises:
        OvalError: there is no such model, or its config cannot be read.
    """
    path = resolve_model(model)
    with _clear_errors(model, "config"):
        return AutoConfig.from_pretrained(path)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of an embedded model, a folder or a hub id.

    Raises:
        OvalError: there is no such model, or no tokenizer with it.
    """
    path = resolve_model(model)
    with _clear_errors(model, "tokenizer"):
        return AutoTokenizer.from_pretrained(path)


def load_model(
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    *,
    attention: str | None = None,
) -> PreTrainedModel:
    """Returns the model with its weights, in evaluation mode.

    Args:
        model: an embedded model, a folder or a hub id.
        dtype: one of `DTYPES`.
        device: one of `DEVICES`.
        attention: Hugging Face's own attention (`sdpa`, `eager`); None takes its default.

    Raises:
        OvalError: no such model, weights missing or broken, an unknown dtype or device.
    """
    target = resolve_device(device)
    weights_dtype = resolve_dtype(dtype, target)
    config = load_config_of(model)
    auto = AutoModelForImageTextToText if config.model_type in WRAPPERS else AutoModelForCausalLM
    with _clear_errors(model, "model"):
        loaded, info = auto.from_pretrained(
            resolve_model(model),
            config=config,
            dtype=weights_dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"model {model!r}: {len(missing)} weights are missing, the first is {missing[0]}; they would be "
            "random. Give a whole checkpoint of a decoder."
        )
    return loaded.to(target).eval()


@contextlib.contextmanager
def _clear_errors(model: str, what: str) -> Iterator[None]:
    """Turns whatever the loader raises into `ModelLoadError`; its progress bars are off meanwhile."""
    bars_were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except _LOADING_ERRORS as error:
        if isinstance(error, OvalError):
            raise
        raise ModelLoadError(f"cannot load the {what} of {model!r}: {error}") from error
    finally:
        if bars_were_on:
            logging.enable_progress_bar()

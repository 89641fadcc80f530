"""Writes Medusa heads so that TGI (layout C) and vLLM (layout E) serve them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oval_core.errors import ConfigError
from oval_spec.heads.base import DraftHeads
from oval_spec.heads.facts import BaseFacts
from oval_spec.heads.medusa import MedusaHeads
from oval_spec.layouts.medusa import CONFIG_NAME
from oval_spec.layouts.own import check_saved
from oval_spec.layouts.weight_files import make_folder

TGI_NAME = "medusa_lm_head.safetensors"
VLLM_NAME = "model.safetensors"


def write_tgi(
    folder: str | Path,
    heads: DraftHeads,
    facts: BaseFacts,
    *,
    base_name: str,
    drops_vocabulary: bool = False,
) -> None:
    """Writes layout C: `{head}.0.linear.weight` and `.bias`, the LM head being the base's.

    Args:
        folder: made where it is not there.
        heads: Medusa heads of one layer with a bias and the shared LM head: what TGI's second version reads.
        facts: the base.
        base_name: its folder or hub id, which TGI loads.
        drops_vocabulary: TGI drafts from all tokens; heads that were trained on a draft vocabulary then propose tokens
            that they never saw, and this must be said yes to.
    """
    medusa = _medusa("TGI", heads, facts)
    if medusa.num_layers != 1 or not medusa.has_bias or medusa.own_lm_heads:
        raise ConfigError(
            f"writing heads for TGI: got {medusa.settings()}. Allowed: one layer with a bias, and the shared LM head. Train "
            "such heads, or write them for vLLM."
        )
    if medusa.vocabulary is not None and not drops_vocabulary:
        raise ConfigError(
            f"writing heads for TGI: got heads for {len(medusa.vocabulary)} draft tokens. Allowed: heads for all tokens, as "
            "TGI has no draft vocabulary. Pass drops_vocabulary=True to write them for all tokens nevertheless."
        )
    state = {
        f"{head}.0.linear.{part}": medusa.get_parameter(f"blocks.{head}.0.linear.{part}")
        for head in range(medusa.num_heads)
        for part in ("weight", "bias")
    }
    config = {
        "medusa_num_heads": medusa.num_heads,
        "medusa_num_layers": 1,
        "version": "2",
        "base_model_name_or_path": base_name,
        "base_model_type": facts.model_type,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
    }
    _write(Path(folder), TGI_NAME, state, config)


def write_vllm(folder: str | Path, heads: DraftHeads, facts: BaseFacts) -> None:
    """Writes layout E: `blocks.{head}.layers.{layer}.weight`, LM heads or one `lm_head.weight`, and `token_map`.

    Args:
        folder: made where it is not there.
        heads: Medusa heads. Without LM heads of their own they must be bound: vLLM wants the base's rows in the file.
        facts: the base.
    """
    medusa = _medusa("vLLM", heads, facts)
    state: dict[str, torch.Tensor] = {}
    for head in range(medusa.num_heads):
        for layer in range(medusa.num_layers):
            for part in ("weight", "bias") if medusa.has_bias else ("weight",):
                own = medusa.get_parameter(f"blocks.{head}.{layer}.linear.{part}")
                state[f"blocks.{head}.layers.{layer}.{part}"] = own
        if medusa.own_lm_heads:
            state[f"lm_heads.{head}.weight"] = medusa.get_parameter(f"lm_heads.{head}.weight")
    if not medusa.own_lm_heads:
        rows, bias = medusa.lm_head_rows()
        if bias is not None:
            raise ConfigError(
                "writing heads for vLLM: got a base whose LM head has a bias. Allowed: an LM head without one, as vLLM's "
                "Medusa has none. Train heads with LM heads of their own."
            )
        state["lm_head.weight"] = rows.to(medusa.dtype)
    # vLLM takes every key with `num` and `heads`, or `num` and `layers`, in its name for these two: no others here.
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "num_heads": medusa.num_heads,
        "num_hidden_layers": medusa.num_layers,
        "medusa_fc_bias": medusa.has_bias,
        "original_lm_head": not medusa.own_lm_heads,
        "base_model_type": facts.model_type,
        "torch_dtype": str(medusa.dtype).removeprefix("torch."),
    }
    if medusa.vocabulary is not None:
        state["token_map"] = medusa.vocabulary.token_ids
        config["truncated_vocab_size"] = len(medusa.vocabulary)
    _write(Path(folder), VLLM_NAME, state, config)


def _medusa(reader: str, heads: DraftHeads, facts: BaseFacts) -> MedusaHeads:
    if not isinstance(heads, MedusaHeads):
        raise ConfigError(
            f"writing heads for {reader}: got {heads.kind} heads. Allowed: medusa heads, the kind that {reader} serves. "
            "Train these (`oval train medusa --kind independent`)."
        )
    check_saved(heads, facts)
    return heads


def _write(
    folder: Path, name: str, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    make_folder(folder)
    # Clones: safetensors refuses tensors that share memory, and LM heads may.
    save_file({key: value.detach().cpu().clone() for key, value in state.items()}, folder / name)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

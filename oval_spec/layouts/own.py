"""OVAL's own files of draft heads: `oval_heads.safetensors` (weights) and `oval_heads.json` (shape, base, training, accuracy)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_core.written_folder import read_facts
from oval_spec.heads.base import DraftHeads
from oval_spec.heads.create import create_heads
from oval_spec.heads.facts import BaseFacts
from oval_spec.heads.vocabulary import DraftVocabulary
from oval_spec.layouts.fit import check_fit
from oval_spec.layouts.report import LayoutReport
from oval_spec.layouts.weight_files import make_folder

WEIGHTS_NAME = "oval_heads.safetensors"
CONFIG_NAME = "oval_heads.json"
_FORMAT = "oval-heads-1"
_TOKEN_MAP = "token_map"  # the draft vocabulary, beside the weights


def save_heads(
    folder: str | Path,
    heads: DraftHeads,
    facts: BaseFacts,
    *,
    training: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes both files; the config last, so that a new folder with a config is whole.

    Args:
        folder: made where it is not there.
        heads: with their vocabulary and accuracy. Weights of the base are not written.
        facts: the base that they were trained for.
        training: command, data, seed and figures: what JSON can hold.
        dtype: of the weights in the file; None for the heads' own.
    Raises:
        ConfigError: heads for another base, or a path that cannot be a folder.
    """
    check_saved(heads, facts)
    folder = make_folder(folder)
    state = {
        name: weight.detach().to("cpu", dtype or weight.dtype).contiguous()
        for name, weight in heads.state_dict().items()
    }
    if heads.vocabulary is not None:
        state[_TOKEN_MAP] = heads.vocabulary.token_ids.int()
    values = {
        "format": _FORMAT,
        "kind": heads.kind,
        "settings": heads.settings(),
        "base": {name: getattr(facts, name) for name in facts.__slots__},
        "num_draft_tokens": None if heads.vocabulary is None else len(heads.vocabulary),
        "accuracy": heads.accuracy,
        "training": dict(training or {}),
    }
    text = json.dumps(values, indent=1) + "\n"  # fails before a file is touched
    partial = folder / f"{WEIGHTS_NAME}.partial"
    save_file(state, partial)
    partial.replace(folder / WEIGHTS_NAME)
    partial = folder / f"{CONFIG_NAME}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / CONFIG_NAME)


def check_saved(heads: DraftHeads, facts: BaseFacts) -> None:
    """Raises `ConfigError` unless the heads are for the base that is written beside them."""
    vocabulary = heads.vocabulary
    if heads.hidden_size != facts.hidden_size or (
        vocabulary is not None and vocabulary.vocab_size != facts.vocab_size
    ):
        raise ConfigError(
            f"saving heads: got heads of hidden size {heads.hidden_size} and facts {facts}. Allowed: facts of the model "
            "that the heads were trained for. Pass those."
        )


def is_own(folder: Path) -> bool:
    """Whether a folder has OVAL's own files."""
    return (folder / CONFIG_NAME).is_file()


def load_own(folder: Path, base: BaseFacts) -> tuple[DraftHeads, LayoutReport]:
    """Reads what `save_heads` wrote: heads in evaluation mode, in the file's dtype, on the CPU.

    Raises:
        ConfigError: a file is missing, is not what it should be, or belongs to another base.
    """
    values = read_facts(
        folder,
        "heads",
        config=CONFIG_NAME,
        weights=WEIGHTS_NAME,
        form=_FORMAT,
        written_by="oval train medusa",
    )
    try:
        facts = BaseFacts(**values["base"])
        state = load_file(folder / WEIGHTS_NAME)
        ids = state.pop(_TOKEN_MAP, None)
        check_fit(folder, base, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size,
                  model_type=facts.model_type)  # fmt: skip
        vocabulary = None if ids is None else DraftVocabulary(ids, facts.vocab_size)
        with torch.device("meta"):  # nothing is allocated for what a config merely says
            heads = create_heads(values["kind"], values["settings"], vocabulary)
        heads.load_state_dict(state, assign=True)
        heads.accuracy = _accuracy(values.get("accuracy"), heads.num_heads)
        if not all(bool(weight.isfinite().all()) for weight in heads.parameters()):
            raise ValueError("some weights are not finite")
    except ConfigError:
        raise
    except (LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ConfigError(
            f"heads {folder}: {WEIGHTS_NAME} and {CONFIG_NAME} do not make heads ({error}). Allowed: both files as "
            "`oval train medusa` writes them. Train again, or copy both files."
        ) from error
    return heads.eval().requires_grad_(False), _report(heads, values)


def _accuracy(table: Any, num_heads: int) -> list[list[float]] | None:
    if table is None:
        return None
    rows = [[float(share) for share in row] for row in table]
    if len(rows) != num_heads or not all(0 <= share <= 1 for row in rows for share in row):
        raise ValueError(f"accuracy must be shares by head and rank, for {num_heads} heads")
    return rows


def _report(heads: DraftHeads, values: Mapping[str, Any]) -> LayoutReport:
    settings = heads.settings()
    own_rows = bool(settings.get("own_lm_heads", 0))
    return LayoutReport(
        layout="oval",
        files=(WEIGHTS_NAME, CONFIG_NAME),
        kind=heads.kind,
        num_heads=heads.num_heads,
        num_layers=settings["num_layers"],
        has_bias=settings.get("has_bias", True),
        has_own_lm_heads=own_rows,
        num_draft_tokens=None if heads.vocabulary is None else len(heads.vocabulary),
        said=settings,
        training=values.get("training") or {},
    )

"""Reads Medusa heads of layouts A to E by their keys. K heads, L layers, C hidden size, V' rows of an LM head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oval_core.errors import ConfigError
from oval_spec.heads.facts import BaseFacts
from oval_spec.heads.medusa import MedusaHeads
from oval_spec.heads.vocabulary import DraftVocabulary
from oval_spec.layouts.fit import check_fit
from oval_spec.layouts.head_keys import HeadKeys, config_says, contradictions, sort_keys
from oval_spec.layouts.report import LayoutReport
from oval_spec.layouts.weight_files import WeightFiles, find_weights, read_json

CONFIG_NAME = "config.json"
_MERGED_NOTE = "these heads were trained together with the base weights beside them: they fit that base, not the one it came from"
_TIED_NOTE = "the layers of each head are equal: upstream repeats one layer, saved many times"


def load_medusa(folder: Path, base: BaseFacts) -> tuple[MedusaHeads, LayoutReport]:
    """Returns heads and what was found.

    Raises:
        ConfigError: the files are no Medusa heads, are not whole, or do not fit the base.
    """
    config = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    _refuse_hydra(folder, config, ())
    files = find_weights(folder)
    _refuse_hydra(folder, config, tuple(files.places))
    keys = sort_keys(folder, files.places)
    _check_config(folder, base, config, keys)
    tensors = files.read(keys.used())
    _check_layers(folder, base, keys, tensors)
    vocabulary = _vocabulary(folder, base, config, keys, tensors)
    rows = _lm_head_rows(folder, base, keys, tensors, vocabulary)
    heads = _built(base, keys, tensors, vocabulary, rows)
    return heads, _report(files, config, keys, heads)


def _refuse_hydra(folder: Path, config: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    names = [*config, *keys, *(path.name for path in folder.glob("hydra*"))]
    found = next((name for name in names if "hydra" in name.lower()), None)
    if found is not None:
        raise ConfigError(
            f"heads {folder}: got Hydra heads ({found}). Allowed: Medusa heads, or OVAL's own sequential heads. Train "
            "sequential heads for this model (`oval train medusa`)."
        )


def _check_config(folder: Path, base: BaseFacts, config: Mapping[str, Any], keys: HeadKeys) -> None:
    """Refuses another base by what the config says, where it says it."""
    text = config.get("text_config")
    facts = text if isinstance(text, dict) and keys.style == "merged" else config
    family = config.get("base_model_type")
    if family is None and keys.style == "merged":
        family = facts.get("model_type")
    check_fit(
        folder,
        base,
        hidden_size=facts.get("hidden_size"),
        vocab_size=facts.get("vocab_size"),
        model_type=family,
    )


def _check_layers(
    folder: Path, base: BaseFacts, keys: HeadKeys, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuses weights of other shapes, of whole numbers, or that are not finite."""
    C = base.hidden_size
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(keys.weights.values(), (C, C))
    wanted |= dict.fromkeys(keys.biases.values(), (C,))
    lm_heads = [*keys.lm_heads.values(), *filter(None, [keys.shared_lm_head])]
    for key in (*wanted, *lm_heads):
        tensor = tensors[key]
        shape = wanted.get(key, (len(tensor) if tensor.dim() else 0, C))
        if tuple(tensor.shape) != shape:
            got = "x".join(map(str, tensor.shape)) or "a number"
            raise ConfigError(
                f"heads {folder}: got {key} of shape {got} for a model with hidden size {C}. Allowed: "
                f"{'x'.join(map(str, shape))}. Use heads that were trained for this model."
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ConfigError(
                f"heads {folder}: got {key} of {tensor.dtype} with values that are no finite floats. Allowed: weights in "
                "float16, bfloat16 or float32. Get the heads again, not quantised."
            )


def _vocabulary(
    folder: Path,
    base: BaseFacts,
    config: Mapping[str, Any],
    keys: HeadKeys,
    tensors: Mapping[str, torch.Tensor],
) -> DraftVocabulary | None:
    size = config.get("truncated_vocab_size") if keys.style == "vllm" else None
    if keys.token_map is not None:
        return DraftVocabulary(tensors[keys.token_map], base.vocab_size)
    if isinstance(size, int) and size < base.vocab_size:
        raise ConfigError(
            f"heads {folder}: got truncated_vocab_size {size} without token_map. Allowed: both, or neither. Copy the file "
            "again: it must have the key token_map."
        )
    return None


def _lm_head_rows(
    folder: Path,
    base: BaseFacts,
    keys: HeadKeys,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: DraftVocabulary | None,
) -> int:
    """Returns the rows V' of own LM heads, 0 where they are shared; refuses other numbers of rows."""
    allowed = {base.vocab_size} | ({len(vocabulary)} if vocabulary is not None else set())
    own = [*keys.lm_heads.values(), *filter(None, [keys.shared_lm_head])]
    for key in own:
        if len(tensors[key]) not in allowed:
            raise ConfigError(
                f"heads {folder}: got {key} with {len(tensors[key])} rows for a model with {base.vocab_size} tokens. "
                f"Allowed: {' or '.join(map(str, sorted(allowed)))}. Use heads that were trained for this model."
            )
    if not keys.lm_heads:
        return 0
    return base.vocab_size if vocabulary is None else len(vocabulary)


def _built(
    base: BaseFacts,
    keys: HeadKeys,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: DraftVocabulary | None,
    rows: int,
) -> MedusaHeads:
    with torch.device(
        "meta"
    ):  # the file's tensors become the parameters; nothing is allocated twice
        heads = MedusaHeads(
            keys.num_heads,
            base.hidden_size,
            num_layers=keys.num_layers,
            has_bias=bool(keys.biases),
            own_lm_heads=rows,
            vocabulary=vocabulary,
        )
    state = {f"blocks.{h}.{n}.linear.weight": tensors[key] for (h, n), key in keys.weights.items()}
    state |= {f"blocks.{h}.{n}.linear.bias": tensors[key] for (h, n), key in keys.biases.items()}
    for (head, _), key in keys.lm_heads.items():
        weight = tensors[key]
        if vocabulary is not None and len(weight) > rows:
            weight = weight[vocabulary.token_ids]
        state[f"lm_heads.{head}.weight"] = weight
    dtype = next(iter(state.values())).dtype
    heads.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    return heads.eval().requires_grad_(False)


def _report(
    files: WeightFiles, config: Mapping[str, Any], keys: HeadKeys, heads: MedusaHeads
) -> LayoutReport:
    said = config_says(config, keys.style)
    tokens = None if heads.vocabulary is None else len(heads.vocabulary)
    found = {
        "medusa_num_heads": heads.num_heads,
        "num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": heads.has_bias,
        "original_lm_head": not heads.own_lm_heads,
        "truncated_vocab_size": config.get("vocab_size") if tokens is None else tokens,
    }
    names = files.names(keys.used())
    notes = [_MERGED_NOTE] if keys.style == "merged" else []
    if _is_tied(heads):
        notes.append(_TIED_NOTE)
    if keys.shared_lm_head is not None:
        notes.append(f"{keys.shared_lm_head} is taken for the base's LM head, which is used")
    return LayoutReport(
        layout=_letter(keys, names),
        files=names,
        kind=heads.kind,
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        has_bias=heads.has_bias,
        has_own_lm_heads=bool(heads.own_lm_heads),
        num_draft_tokens=tokens,
        said=said,
        contradictions=contradictions(said, found),
        ignored=tuple(keys.ignored),
        notes=tuple(notes),
    )


def _letter(keys: HeadKeys, names: tuple[str, ...]) -> str:
    if keys.style != "plain":
        return "D" if keys.style == "merged" else "E"
    if not keys.lm_heads:
        return "C"
    return "B" if names[0].endswith(".safetensors") else "A"


def _is_tied(heads: MedusaHeads) -> bool:
    if heads.num_layers < 2:
        return False
    for head in range(heads.num_heads):
        weights = [p for name, p in heads.named_parameters() if name.startswith(f"blocks.{head}.")]
        step = 1 + heads.has_bias
        if any(not torch.equal(weights[i], weights[i % step]) for i in range(len(weights))):
            return False
    return True

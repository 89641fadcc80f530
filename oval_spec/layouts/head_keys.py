"""What the keys of Medusa layouts A to E mean: which tensor is which layer of which head. It reads no tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oval_core.errors import ConfigError

_MERGED = "medusa_head."  # D: before the names of A, among the base's weights
_OPTIONAL = "medusa_heads."  # E: what vLLM's loader drops
_LAYER = re.compile(r"(\d{1,4})\.(\d{1,4})\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d{1,4})\.(\d{1,4})\.weight")
_VLLM_LAYER = re.compile(r"blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d{1,4})\.weight")


@dataclass(slots=True)
class HeadKeys:
    """The keys of a file, sorted out.

    Attributes:
        style: `plain` (A, B, C), `merged` (D) or `vllm` (E).
        weights: key of a layer's weight by (head, layer).
        biases: key of its bias, where it has one.
        lm_heads: key of a head's own LM head, by (head, place after the layers); place -1 where the name has none.
        shared_lm_head: key of one LM head for all heads.
        token_map: key of the draft vocabulary.
        ignored: keys that mean nothing here.
    """

    style: str
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    biases: dict[tuple[int, int], str] = field(default_factory=dict)
    lm_heads: dict[tuple[int, int], str] = field(default_factory=dict)
    shared_lm_head: str | None = None
    token_map: str | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def num_heads(self) -> int:
        """Heads, once `check_whole` has passed."""
        return 1 + max(head for head, _ in (*self.weights, *self.lm_heads))

    @property
    def num_layers(self) -> int:
        """Layers of a head."""
        return 1 + max((layer for _, layer in self.weights), default=-1)

    def used(self) -> list[str]:
        """Returns the keys that mean something."""
        single = [key for key in (self.shared_lm_head, self.token_map) if key is not None]
        return [*self.weights.values(), *self.biases.values(), *self.lm_heads.values(), *single]


def sort_keys(folder: Path, keys: Collection[str]) -> HeadKeys:
    """Returns what the keys mean.

    Raises:
        ConfigError: they are no Medusa heads, or some heads or layers are missing.
    """
    found = HeadKeys(_style(keys))
    place = _place_vllm if found.style == "vllm" else _place_medusa
    for key in sorted(keys):
        if not place(found, key):
            found.ignored.append(key)
    if not found.weights and not found.lm_heads:
        names = ", ".join(sorted(keys)[:4]) or "none"
        raise ConfigError(
            f"heads {folder}: got keys without draft heads ({names}, ...). Allowed: 0.0.linear.weight and so on (Medusa, "
            "TGI), medusa_head.0.0.linear.weight (merged), blocks.0.layers.0.weight (vLLM). Name a folder with heads."
        )
    _check_complete(folder, found)
    return found


def _style(keys: Collection[str]) -> str:
    if any(_VLLM_LAYER.fullmatch(key.replace(_OPTIONAL, "")) for key in keys):
        return "vllm"
    return "merged" if any(key.startswith(_MERGED) for key in keys) else "plain"


def _place_medusa(found: HeadKeys, key: str) -> bool:
    """Puts a key of A to D where it belongs; returns whether it belongs anywhere."""
    if found.style == "merged" and not key.startswith(_MERGED):
        return False
    name = key.removeprefix(_MERGED)
    if match := _LAYER.fullmatch(name):
        kind = found.weights if match[3] == "weight" else found.biases
        kind[int(match[1]), int(match[2])] = key
        return True
    if match := _LM_HEAD.fullmatch(name):
        found.lm_heads[int(match[1]), int(match[2])] = key
        return True
    return False


def _place_vllm(found: HeadKeys, key: str) -> bool:
    name = key.replace(_OPTIONAL, "")  # anywhere in the name, as vLLM does
    if match := _VLLM_LAYER.fullmatch(name):
        kind = found.weights if match[3] == "weight" else found.biases
        kind[int(match[1]), int(match[2])] = key
    elif match := _VLLM_LM_HEAD.fullmatch(name):
        found.lm_heads[int(match[1]), -1] = key
    elif name == "lm_head.weight":
        found.shared_lm_head = key
    elif name == "token_map":
        found.token_map = key
    else:
        return False
    return True


def _check_complete(folder: Path, found: HeadKeys) -> None:
    """Raises `ConfigError` unless every head from 0 on has the same layers, all with a bias or none, and an end."""
    K, L = found.num_heads, found.num_layers
    wanted = [(head, layer) for head in range(K) for layer in range(L)]
    ends = {(head, -1 if found.style == "vllm" else L) for head in range(K)}
    if missing := next((place for place in wanted if place not in found.weights), None):
        _refuse(folder, found, f"no layer {missing[1]} of head {missing[0]}")
    if found.biases and (odd := sorted(set(wanted) ^ set(found.biases))):
        _refuse(
            folder,
            found,
            f"a bias for some layers, not for all (head {odd[0][0]}, layer {odd[0][1]})",
        )
    if (
        found.lm_heads
        and found.shared_lm_head is None
        and (odd := sorted(ends ^ set(found.lm_heads)))
    ):
        # vLLM reads `lm_heads.0.weight` alone as the shared one.
        if found.style == "vllm" and set(found.lm_heads) == {(0, -1)}:
            found.shared_lm_head = found.lm_heads.pop((0, -1))
            return
        _refuse(folder, found, f"LM heads that do not end every head (head {odd[0][0]})")
    if found.lm_heads and found.shared_lm_head is not None:
        _refuse(folder, found, f"both {found.shared_lm_head} and LM heads of heads")
    if found.style == "vllm" and not found.lm_heads and found.shared_lm_head is None:
        _refuse(folder, found, "no lm_head.weight and no lm_heads.0.weight")


def _refuse(folder: Path, found: HeadKeys, what: str) -> None:
    raise ConfigError(
        f"heads {folder}: got {what}, with {found.num_heads} heads of {found.num_layers} layers by the largest numbers. "
        "Allowed: heads 0, 1, 2 and so on, each whole. Copy the file again."
    )


def config_says(config: Mapping[str, object], style: str) -> dict[str, object]:
    """Returns what a config says about heads, by its own names."""
    names = ["medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version"]
    if style == "vllm":
        names = [
            "num_heads",
            "num_hidden_layers",
            "medusa_fc_bias",
            "original_lm_head",
            "truncated_vocab_size",
            *names,
        ]
    return {name: config[name] for name in names if config.get(name) is not None}


def contradictions(said: Mapping[str, object], found: Mapping[str, object]) -> tuple[str, ...]:
    """Returns lines on where a config says otherwise than the keys.

    Args:
        said: of `config_says`.
        found: what the keys say, by the same names; other names are not compared.
    """
    return tuple(
        f"{name}: config says {value}, keys say {found[name]}; the keys are used"
        for name, value in said.items()
        if name in found and value != found[name]
    )

"""Draft heads written out slowly: Medusa layouts as upstream documents them, formulas row by row, trees by brute force."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oval_spec.heads import DraftHeads, SequentialHeads

C, V = 6, 40


@dataclass
class MedusaParts:
    """Weights of K Medusa heads: layers[k][l] = (W, b or None); LM heads [k] or None."""

    layers: list[list[tuple[torch.Tensor, torch.Tensor | None]]]
    lm_heads: list[torch.Tensor] | None
    token_map: torch.Tensor | None = None


def make_parts(
    num_heads: int = 3,
    num_layers: int = 1,
    *,
    own: bool = True,
    bias: bool = True,
    rows: int = V,
    seed: int = 0,
) -> MedusaParts:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    layers = [
        [(random(C, C), random(C) if bias else None) for _ in range(num_layers)]
        for _ in range(num_heads)
    ]
    return MedusaParts(layers, [random(rows, C) for _ in range(num_heads)] if own else None)


def medusa_logits(parts: MedusaParts, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """Logits [R, K, V'] of every head, one row and one layer at a time."""
    rows = []
    for h in hidden:
        heads = []
        for k, layers in enumerate(parts.layers):
            x = h
            for weight, bias in layers:
                z = weight @ x + (0 if bias is None else bias)
                x = x + z / (1 + torch.exp(-z))
            last = lm_head if parts.lm_heads is None else parts.lm_heads[k]
            heads.append(last @ x)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def medusa_names(parts: MedusaParts, prefix: str = "") -> dict[str, torch.Tensor]:
    """Upstream's own names: `nn.Sequential(*[ResBlock] * L, Linear)` in a ModuleList."""
    state = {}
    for k, layers in enumerate(parts.layers):
        for n, (weight, bias) in enumerate(layers):
            state[f"{prefix}{k}.{n}.linear.weight"] = weight
            if bias is not None:
                state[f"{prefix}{k}.{n}.linear.bias"] = bias
        if parts.lm_heads is not None:
            state[f"{prefix}{k}.{len(layers)}.weight"] = parts.lm_heads[k]
    return {name: weight.clone() for name, weight in state.items()}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _medusa_config(folder: Path, parts: MedusaParts, **more: Any) -> None:
    says = {"medusa_num_heads": len(parts.layers), "medusa_num_layers": len(parts.layers[0])}
    write_json(folder / "config.json", says | {"base_model_name_or_path": "some/base"} | more)


def write_a(folder: Path, parts: MedusaParts, **config: Any) -> None:
    _medusa_config(folder, parts, **config)
    torch.save(medusa_names(parts), folder / "medusa_lm_head.pt")


def write_b(folder: Path, parts: MedusaParts, **config: Any) -> None:
    """Also layout C, with parts that have no LM heads."""
    _medusa_config(folder, parts, **config)
    save_file(medusa_names(parts), folder / "medusa_lm_head.safetensors")


def write_d(folder: Path, parts: MedusaParts, **config: Any) -> None:
    """A merged model in three files, one of them without any head."""
    base = {"model.embed_tokens.weight": torch.zeros(V, C), "lm_head.weight": torch.zeros(V, C)}
    heads = medusa_names(parts, "medusa_head.")
    cut = len(heads) // 2
    shards = [base, dict(list(heads.items())[:cut]), dict(list(heads.items())[cut:])]
    facts = {"model_type": "llama", "hidden_size": C, "vocab_size": V, "num_hidden_layers": 32}
    _medusa_config(folder, parts, **facts | config)
    places = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(shard, folder / name)
        places.update(dict.fromkeys(shard, name))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def write_e(
    folder: Path, parts: MedusaParts, lm_head: torch.Tensor, prefix: str = "", **config: Any
) -> None:
    """vLLM's names. `lm_head` is written where the parts have no LM heads."""
    state = {}
    for k, layers in enumerate(parts.layers):
        for n, (weight, bias) in enumerate(layers):
            state[f"{prefix}blocks.{k}.layers.{n}.weight"] = weight
            if bias is not None:
                state[f"{prefix}blocks.{k}.layers.{n}.bias"] = bias
        if parts.lm_heads is not None:
            state[f"{prefix}lm_heads.{k}.weight"] = parts.lm_heads[k]
    if parts.lm_heads is None:
        state[f"{prefix}lm_head.weight"] = lm_head
    says: dict[str, Any] = {
        "model_type": "medusa",
        "hidden_size": C,
        "vocab_size": V,
        "num_heads": len(parts.layers),
        "num_hidden_layers": len(parts.layers[0]),
        "medusa_fc_bias": parts.layers[0][0][1] is not None,
        "original_lm_head": parts.lm_heads is None,
    }
    if parts.token_map is not None:
        state["token_map"] = parts.token_map
        says["truncated_vocab_size"] = len(parts.token_map)
    write_json(folder / "config.json", says | config)
    save_file(
        {name: weight.clone() for name, weight in state.items()}, folder / "model.safetensors"
    )


def vllm_logits(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any], hidden: torch.Tensor
) -> torch.Tensor:
    """What vLLM's loader and model make of a file: logits [R, K, V], -inf where a truncated vocabulary has no row."""
    truncated = config.get("truncated_vocab_size") or config["vocab_size"]
    token_map = state.get("token_map") if truncated < config["vocab_size"] else None
    heads = []
    for k in range(config["num_heads"]):
        x = hidden
        for n in range(config["num_hidden_layers"]):
            z = x @ state[f"blocks.{k}.layers.{n}.weight"].T
            if config["medusa_fc_bias"]:
                z = z + state[f"blocks.{k}.layers.{n}.bias"]
            x = x + torch.nn.functional.silu(z)
        name = "lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"
        logits = x @ state[name].T
        assert logits.shape[1] == truncated
        if token_map is not None:
            wide = torch.full((len(x), config["vocab_size"]), -torch.inf)
            wide[:, token_map] = logits
            logits = wide
        heads.append(logits)
    return torch.stack(heads, 1)


def sequential_states(
    heads: SequentialHeads, hidden: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    """States [R, K, C] of sequential heads without context, one row and one part at a time."""

    def normed(norm: torch.nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        done = []
        for part, gain, shift in zip(parts, norm.weight, norm.bias, strict=True):
            centred = part - part.mean()
            done.append(centred / (centred.square().mean() + 1e-5).sqrt() * gain + shift)
        return torch.cat(done)

    def mlp(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = layer.up.weight @ x + layer.up.bias
        if layer.is_gated:
            half = len(x) // 2
            x = torch.nn.functional.silu(x[:half]) * x[half:]
        else:
            x = torch.nn.functional.silu(x)
        return layer.down.weight @ x + layer.down.bias

    rows = []
    for h, path in zip(hidden, embeddings, strict=True):
        state, states = h, []
        for k in range(heads.num_heads):
            if heads.form == "prefix":
                cell, state, others = k, h, list(path[: k + 1])
            else:
                cell = min(k, heads.num_cells - 1)
                others = [h, path[k]] if heads.sees_hidden else [path[k]]
            for layer, norm in zip(heads.cells[cell], heads.norms[k], strict=True):
                state = state + mlp(layer, normed(norm, [state, *others]))
            states.append(state)
        rows.append(torch.stack(states))
    return torch.stack(rows)


def likeliest_paths(
    log_probs: Callable[[tuple[int, ...]], torch.Tensor], depth: int, count: int
) -> list[tuple[tuple[int, ...], float]]:
    """The `count` likeliest paths of tokens up to a depth, of all there are; log_probs(path) [V] of the token after."""
    found = []
    log_probs = functools.cache(log_probs)
    size = len(log_probs(()))
    for length in range(1, depth + 1):
        for path in itertools.product(range(size), repeat=length):
            total = sum(float(log_probs(path[:i])[path[i]]) for i in range(length))
            found.append((path, total))
    return sorted(found, key=lambda pair: -pair[1])[:count]


def scatter_weights(heads: DraftHeads, seed: int = 0) -> None:
    """Gives every weight a random value: heads begin as near-identities, which would hide faults."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.5)

"""What a summary of a page's keys tells about its attention mass, given the true query: by kind of summary and its size.

    python benchmarks/page_sketch.py --model smol --data FILE [--context 2048] [--share 0.2]

Share of the mass of a prompt that the best pages by each summary hold (per layer and head), how far its log mass is off, and
its size against keys and values. Prints JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from oval_adapters.bench.machine import machine, versions
from oval_adapters.load_model import load_model, load_tokenizer
from oval_adapters.texts.running_text import cut_places, tokenize
from oval_adapters.texts.source import read_source
from oval_core.routing.key_signals import create_signal

PAGE, QUERIES = 16, 16
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measures every summary on several passages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smol")
    parser.add_argument("--data", required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.2, help="of the pages that are chosen")
    parser.add_argument("--passages", type=int, default=4)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype="bfloat16"), load_tokenizer(options.model)
    source = read_source(options.data)
    text = tokenize(tokenizer, source.name, source.text)
    text, starts = cut_places(text, options.context + QUERIES, options.passages, None, repeat=False)
    found: dict[str, list[tuple[float, float, float]]] = {}
    sizes: dict[str, float] = {}
    for start in starts:
        ids = torch.tensor([text.window(start, options.context + QUERIES).ids])
        for query, keys, scaling in layers(model, ids, options.context):
            measure(query, keys, scaling, options.share, found, sizes)
    rows = [
        {
            "summary": name,
            "bytes_share": round(sizes.get(name, 0.0), 4),
            "mass_recall": round(statistics.fmean(v[0] for v in values), 4),
            "log_mass_bias": round(statistics.fmean(v[1] for v in values), 3),
            "log_mass_error": round(statistics.fmean(v[2] for v in values), 3),
        }
        for name, values in found.items()
    ]
    facts = {"model": options.model, "context": options.context, "share": options.share}
    facts |= {"passages": options.passages, "page_size": PAGE}
    print(
        json.dumps(
            {"rows": rows, **facts, "versions": versions(), "machine": machine(model.device)}
        )
    )


def layers(
    model: PreTrainedModel, ids: torch.Tensor, context: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Yields queries [H, N, D] after the prompt, keys [K, P, n, D] of it, and the scaling, of every third layer."""
    queries: dict[int, tuple[torch.Tensor, float]] = {}

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        new, length = query.shape[2], key.shape[2]
        if new == QUERIES:
            queries[module.layer_idx] = (query[0].float(), scaling)
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True, scale=scaling
        )
        return out.transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register("page_sketch", attend)
    model.set_attn_implementation("page_sketch")
    try:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for piece in (*ids[:, :context].split(512, 1), ids[:, context:]):
                model.get_decoder()(piece, cache=cache)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("page_sketch")
    for layer in range(2, len(cache.layers), 3):
        keys = cache.layers[layer].keys[0, :, :context].float()
        yield queries[layer][0], keys.unflatten(1, (-1, PAGE)), queries[layer][1]


def measure(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    share: float,
    found: dict[str, list[tuple[float, float, float]]],
    sizes: dict[str, float],
) -> None:
    """Adds recall, bias and error of the log mass for every summary of one layer."""
    kv_heads, pages, count, dim = keys.shape
    heads = query.shape[0]
    rows = query.flatten(0, 1)
    grouped = query.reshape(kv_heads, -1, dim) * scaling
    true = (grouped @ keys.flatten(1, 2).transpose(1, 2)).unflatten(-1, (pages, count))
    true = true.logsumexp(-1).view(heads, -1, pages)
    for name in ("none (the oracle)", "mean_key", "estimate", "quest", "arkvale", "sketch"):
        if name.startswith("none"):
            scores = true
        else:
            signal = create_signal(name, scaling, PAGE)
            summary = signal.summarise(keys)
            sizes[name] = summary.shape[-1] / (2 * dim * count)
            scores = signal.score(rows, summary).view(true.shape)
            scores = scores + (math.log(count) if signal.is_mean else 0.0)
        chosen = scores.topk(int(share * pages), -1).indices
        recall = true.softmax(-1).gather(-1, chosen).sum(-1).mean()
        off = (scores - true)[..., 1:]
        found.setdefault(name, []).append(
            (float(recall), float(off.mean()), float(off.abs().mean()))
        )


if __name__ == "__main__":
    main()

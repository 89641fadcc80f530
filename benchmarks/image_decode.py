"""Decode routing on long answers about albums: time a token, tokens, and the attention that the routed pages hold.

The dense answer is read token by token under each policy (teacher forcing), once timed and once watched: so recall, time and
the next token are compared on the same text. Called by image_budgets.py --decode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from oval_adapters import attach
from oval_adapters.evaluation.mm_run import Ask
from oval_adapters.page_report.report import ReadReport
from oval_adapters.page_report.watching import watch_reads
from oval_adapters.training.image_router_record import QuestionReader
from oval_core.config import RoutingConfig

ASK = "Describe each of the pictures, one after the other, in a sentence."
_WARMUP = 2
"""First steps of an answer that are not timed."""

Read = tuple[torch.Tensor, dict[tuple[int, ...], int], list[bool]]
"""What a policy read: mass [layers, steps, pages], the number of each page by its columns, and which are of images."""


@torch.no_grad()
def measure_decode(
    model: Any,
    processor: Any,
    asks: Sequence[Ask],
    *,
    shares: Sequence[float],
    router: str,
    new_tokens: int,
    tile: int,
    tick: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Returns a row for `full`, and one for each share under `routed`.

    Args:
        model: a LLaVA, not attached.
        processor: of the model.
        asks: their pictures are described.
        shares: of the tokens so far that a step reads.
        router: of `routing.router`.
        new_tokens: of each answer.
        tile: of image pages.
        tick: called after each album.
    """
    vision = {"vision": {"tile": tile}}
    routed = [
        {**vision, "policy": "routed", "routing": {"router": router, "budget_share": share}}
        for share in shares
    ]
    found, width = [], 0
    for number, ask in enumerate(asks, start=1):
        with attach(model, vision) as oval:
            reader = QuestionReader(oval, processor, max_new_tokens=new_tokens)
            inputs = reader.inputs(replace(ask, text=ASK))
            limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
            output = model.generate(**inputs, do_sample=False, **limits)
        width = inputs["input_ids"].shape[1]
        configs = (vision, *routed)
        timed = [_timed(model, config, inputs, output) for config in configs]
        reads = [_read(model, config, inputs, output, processor) for config in configs]
        pairs = zip(timed, reads, strict=True)
        found.append([_compared(timed[0], own, reads[0], read) for own, read in pairs])
        tick("describing albums", number, len(asks))
    facts = {"albums": len(asks), "new_tokens": new_tokens, "router": router}
    return {"rows": _rows(found, (None, *shares)), "prompt_tokens": width, **facts}


def _rows(
    albums: Sequence[Sequence[dict[str, float]]], shares: Sequence[float | None]
) -> list[dict[str, Any]]:
    rows = []
    for place, share in enumerate(shares):
        own = [album[place] for album in albums]
        names = ("ms", "recall", "image_recall", "agreement")
        rows.append(
            {
                "policy": "full" if share is None else "routed",
                "share": share,
                **{name: statistics.fmean(album[name] for album in own) for name in names},
                "ratio": statistics.median(album["ratio"] for album in own),
                "identical": sum(album["agreement"] == 1 for album in own),
            }
        )
    return rows


def _forced(model: Any, cache: Any, inputs: Any, answer: torch.Tensor) -> tuple[list[float], list[int]]:  # fmt: skip
    """Reads the prompt, then the answer token by token; returns milliseconds a step, and what each would say next."""
    logits = model(**inputs, cache=cache, logits_to_keep=1).logits
    said, ms = [int(logits[0, -1].argmax())], []
    for token in answer[:-1]:
        start = time.perf_counter()
        logits = model(input_ids=token.view(1, 1), cache=cache, logits_to_keep=1).logits
        said.append(int(logits[0, -1].argmax()))
        ms.append(1e3 * (time.perf_counter() - start))
    return ms, said


def _timed(
    model: Any, config: dict[str, Any], inputs: Any, output: torch.Tensor
) -> tuple[float, list[int]]:
    width = inputs["input_ids"].shape[1]
    with attach(model, config) as oval:
        cache = oval.new_cache(reserve_tokens=output.shape[1])
        ms, said = _forced(model, cache, inputs, output[0, width:])
        cache.close()
    return statistics.median(ms[_WARMUP:] or ms), said


def _read(
    model: Any, config: dict[str, Any], inputs: Any, output: torch.Tensor, processor: Any
) -> Read:
    width = inputs["input_ids"].shape[1]
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    with attach(model, config) as oval, watch_reads(oval, layer_groups=layers) as reads:
        _forced(model, reads.cache, inputs, output[0, width:])
        report: ReadReport = reads.report(output, processor.tokenizer, prompt_columns=width)
    index = {page.columns: place for place, page in enumerate(report.pages)}
    # the first token comes of the prompt, which every policy reads whole
    return report.by_group[:, 1:], index, [page.kind == "image" for page in report.pages]


def _compared(
    full: tuple[float, list[int]], own: tuple[float, list[int]], dense: Read, read: Read
) -> dict[str, float]:
    mass, index, is_image = dense
    other, other_index, _ = read
    assert index.keys() == other_index.keys(), "the same pages"
    order = [other_index[columns] for columns in index]
    routed = [i for i in range(len(mass)) if i not in RoutingConfig().dense_layers]
    mass, seen = mass[routed], (other[routed][:, :, order] > 0).float()
    image = mass[:, :, is_image]
    agreed = [a == b for a, b in zip(full[1], own[1], strict=True)]
    return {
        "ms": own[0],
        "ratio": own[0] / full[0],
        "agreement": statistics.fmean(agreed),
        "recall": float((mass * seen).sum(-1).mean()),
        "image_recall": float((image * seen[:, :, is_image]).sum() / image.sum().clamp(min=1e-12)),
    }

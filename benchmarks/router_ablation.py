"""What each part of the learned router is worth: variants trained on the same recordings, judged on others.

Replays in the closed loop (what is not read is not observed); several seeds; 95 % intervals by bootstrap over passages and
seeds. Prints JSON on the last line.

    python benchmarks/router_ablation.py --model smol --data TRAIN [TRAIN ...] --test FILE [FILE ...] --work DIR
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from oval_adapters.bench.machine import machine, versions
from oval_adapters.load_model import load_model, load_tokenizer
from oval_adapters.training.gather import gather_recordings
from oval_adapters.training.router_loop import train_router
from oval_adapters.training.router_settings import RouterTraining
from oval_core.routing.recall import mass_recall, missed_effect
from oval_core.routing.recording import Recording
from oval_core.routing.registry import create_router
from oval_core.routing.replay import ReplayOptions, replay
from oval_core.routing.router import Router

VARIANTS: Mapping[str, dict[str, Any]] = {
    "absolute head (the article's)": {
        "head": "absolute", "num_pages": 512, "decay": False, "graph": False, "history": False, "signals": ()
    },
    "content": {"decay": False, "graph": False, "history": False, "signals": ()},
    "content + decay": {"graph": False, "history": False, "signals": ()},
    "content + decay + graph": {"history": False, "signals": ()},
    "content + decay + graph + history": {"signals": ()},
    "all, with key signals": {},
    "all but content": {"content": False},
    "all but graph": {"graph": False},
    "all, full second layer": {"lora_rank": 0},
    "all, focal loss (gamma 2)": {},
}  # fmt: skip
RIVALS = ("oracle_mass", "persistence", "ema", "freekv", "recency")
LEADS, BUDGETS = (1, 4, 16), (0.1, 0.2)


def main() -> None:
    """Trains and judges all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smol")
    parser.add_argument("--data", nargs="+", required=True, help="texts to train on")
    parser.add_argument("--test", nargs="+", required=True, help="texts to judge on")
    parser.add_argument("--work", required=True, help="folder for recordings and checkpoints")
    parser.add_argument("--recordings", help="folder of recordings; one below --work without")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="closed loops to learn from")
    parser.add_argument("--passages", type=int, default=20, help="of each kind, to train on")
    parser.add_argument("--test-passages", type=int, default=4, help="of each kind, to judge on")
    parser.add_argument("--variants", default="", help="names with commas; all without")
    options = parser.parse_args()
    console = Console(stderr=True)
    model = load_model(options.model, dtype="bfloat16")
    tokenizer = load_tokenizer(options.model)

    def told(what: str, done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            console.print(f"{what} {done}/{total}")

    base = RouterTraining(
        model=options.model,
        data=tuple(options.data),
        out=options.work,
        recordings=options.recordings,
        passages=options.passages,
        updates=options.updates,
        rounds=options.rounds,
        save_every=options.updates,
    )
    train = gather_recordings(model, tokenizer, base, told)
    judged = replace(base, data=tuple(options.test), passages=options.test_passages, data_seed=1)
    test = gather_recordings(model, tokenizer, judged, told, split="test")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    wanted = [name for name in options.variants.split(",") if name] or list(VARIANTS)
    rows = [row for name in RIVALS for row in judge(name, [create_router(name)], test)]
    for name in wanted:
        routers: list[Router] = []
        for seed in seeds:
            console.print(f"{name}, seed {seed}")
            folder = str(Path(options.work) / "variants" / f"{list(VARIANTS).index(name)}-{seed}")
            gamma = 2.0 if "gamma 2" in name else base.gamma
            settings = replace(base, seed=seed, router=VARIANTS[name], out=folder, gamma=gamma)
            routers.append(train_router(train, settings, told).router)
        rows += judge(name, routers, test)
        console.print(rows[-1])
    facts = {"model": options.model, "seeds": seeds, "updates": options.updates}
    facts |= {"train_passages": len(train), "test_passages": len(test)}
    facts |= {"versions": versions(), "machine": machine(torch.device("cpu"))}
    print(json.dumps({"rows": rows, **facts}))


def judge(
    name: str, routers: Sequence[Router], recordings: Sequence[Recording]
) -> list[dict[str, Any]]:
    """Returns a row for each kind, lead and budget, and for the mean of the kinds."""
    rows = []
    kinds = sorted({recording.kind for recording in recordings})
    for lead in LEADS:
        for budget in BUDGETS:
            options = ReplayOptions(budget=budget, lead=lead)
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for router in routers:
                for recording in recordings:
                    selections = replay(recording, router, options)
                    effect = missed_effect(recording, selections)
                    found[recording.kind].append((mass_recall(recording, selections), effect))
            facts = {"signal": name, "lead": lead, "budget": budget}
            rows += [{**facts, "kind": kind, **_figures([found[kind]])} for kind in kinds]
            rows.append({**facts, "kind": "mean", **_figures(list(found.values()))})
    return rows


def _figures(kinds: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    return {
        "mass_recall": _mean(kinds, lambda pair: pair[0]),
        "mass_recall_95": _interval(kinds, lambda pair: pair[0]),
        "missed_output": _mean(kinds, lambda pair: pair[1]),
        "missed_output_95": _interval(kinds, lambda pair: pair[1]),
    }


Pick = Callable[[tuple[float, float]], float]


def _mean(kinds: Sequence[Sequence[tuple[float, float]]], pick: Pick) -> float:
    return statistics.fmean(statistics.fmean(map(pick, own)) for own in kinds)


def _interval(kinds: Sequence[Sequence[tuple[float, float]]], pick: Pick) -> list[float]:
    rng = random.Random(0)
    drawn = sorted(
        _mean([rng.choices(own, k=len(own)) for own in kinds], pick) for _ in range(1000)
    )
    return [round(drawn[25], 5), round(drawn[974], 5)]


if __name__ == "__main__":
    main()

"""What do dynamic page sizes cost, and what do they gain?

    python benchmarks/page_sizing.py --tokens 2048,8192,32768 --hidden-size 576
    python benchmarks/page_sizing.py --compare --model smol --data texts.txt --context 2048 --passages 2

The first gives time and peak memory of a sizer on random hidden states of a text of each length, in a process of its own,
so that no length inherits another's memory. The second cuts prompts by every sizing and replays routers over the pages at
equal bytes a step: what summaries of more pages than those of 16 tokens take is taken off the tokens to be read.
The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

DTYPES = ("bfloat16", "float32")


def main() -> None:
    """Starts a process a length, or is one."""
    parser = argparse.ArgumentParser(description="Time and memory of dynamic page sizes by length.")
    parser.add_argument("--tokens", default="2048,4096,8192,16384,32768")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--mean-size", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help="compare sizings by recall")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--data", action="append", default=[], help="a file with texts")
    parser.add_argument("--kinds", default="text,retrieval,chat")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--passages", type=int, default=2, help="of each kind")
    parser.add_argument("--budgets", default="0.1,0.2")
    parser.add_argument("--sizer", help="folder with a trained router and its sizer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.compare and not options.data:
        parser.error("--compare needs --data, a file with texts")
    if options.compare:
        print(json.dumps(compare(options)))
        return
    if options.row:
        print(json.dumps(measure(options)))
        return
    rows = []
    for tokens in options.tokens.split(","):
        argv = [sys.executable, __file__, "--row", "--tokens", tokens, "--dtype", options.dtype]
        argv += ["--hidden-size", str(options.hidden_size), "--mean-size", str(options.mean_size)]
        argv += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    print(json.dumps(describe(options, rows)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Sizes one text several times; returns the median time, and the peak of memory beside the hidden states."""
    import torch

    from oval_adapters.bench.memory import MemoryMeter
    from oval_core.routing.page_sizer import DynamicPageSizer

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    tokens = int(options.tokens)
    hidden = torch.randn(tokens, options.hidden_size, generator=generator)
    hidden = hidden.to(getattr(torch, options.dtype))
    sizer = DynamicPageSizer(options.hidden_size, options.mean_size)
    sizer.head.weight.data = torch.randn(1, options.hidden_size, generator=generator) / 24
    sizer(hidden[:256])  # warm up
    meter = MemoryMeter(hidden.device)
    meter.start()
    sizes = sizer(hidden)
    peak = meter.peak_mb()
    times = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        sizer(hidden)
        times.append(1e3 * (time.perf_counter() - start))
    ms = statistics.median(times)
    return {
        "tokens": tokens,
        "pages": len(sizes),
        "ms": round(ms, 2),
        "ms_min": round(min(times), 2),
        "ms_max": round(max(times), 2),
        "peak_mb": round(peak, 1),
        "ms_per_1k": round(1024 * ms / tokens, 3),
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Records passages under every sizing and replays routers over them; prints a table to stderr."""
    import torch

    from oval_adapters.bench.machine import machine, versions
    from oval_adapters.load_model import load_model, load_tokenizer
    from oval_adapters.texts import passages

    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, "bfloat16", "cpu"), load_tokenizer(options.model)
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    made = passages(
        options.kinds.split(","),
        options.data,
        tokenizer,
        context=options.context,
        steps=options.steps,
        count=options.passages,
        seed=options.seed,
        split="test",
    )
    for place, passage in enumerate(made):
        start = time.perf_counter()
        for row in judged(model, passage, options):
            key = (row.pop("sizing"), row.pop("router"), row.pop("budget"))
            found.setdefault(key, []).append(row)
        took = time.perf_counter() - start
        print(f"{place + 1} of {len(made)} passages, {took:.0f} s", file=sys.stderr)
    rows = [
        {"sizing": sizing, "router": router, "budget": budget, **mean_of(own)}
        for (sizing, router, budget), own in found.items()
    ]
    show(rows)
    return {
        "rows": rows,
        "context": options.context,
        "steps": options.steps,
        "passages": len(made),
        "kinds": options.kinds,
        "seed": options.seed,
        "dtype": "bfloat16",
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }


def judged(model: Any, passage: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each sizing, router and budget of one passage."""
    from oval_adapters.routing.record_many import record_sizes
    from oval_adapters.routing.recorder import RecordOptions
    from oval_core.routing.recall import mass_recall, mass_recall_excluding_kept, output_error
    from oval_core.routing.registry import create_router
    from oval_core.routing.replay import ReplayOptions, kept_pages, replay

    pages = {f"fixed {n}": RecordOptions(page_size=n, signals=("sketch",)) for n in (8, 16, 32)}
    for name, sizes in cut_sizes(model, passage.prompt_ids, options.sizer).items():
        pages[name] = RecordOptions(page_size=16, page_sizes=tuple(sizes), signals=("sketch",))
    recordings = dict(zip(pages, record_sizes(model, passage, list(pages.values())), strict=True))
    rows = []
    for name, recording in recordings.items():
        sizes = recording.counts[recording.starts < options.context].tolist()
        kept = kept_pages(recording, 16, 64)
        for router in ("persistence", "sketch", "oracle_mass"):
            state = state_tokens(recording, router, model)
            more = state - state_tokens(recordings["fixed 16"], router, model)
            for share in (float(part) for part in options.budgets.split(",")):
                tokens = max(1, round(share * options.context - more))
                selections = replay(recording, create_router(router), ReplayOptions(budget=tokens))
                read = (selections * recording.committed()[:, None]).sum(-1).float().mean()
                rest = mass_recall_excluding_kept(recording, selections, kept)
                rows.append(
                    {
                        "sizing": name,
                        "router": router,
                        "budget": share,
                        "recall": mass_recall(recording, selections),
                        "recall_rest": rest,
                        "output_error": output_error(recording, selections),
                        "tokens_allowed": tokens,
                        "tokens_read": read.item(),
                        "state_tokens": state,
                        "state_kb": state * recording.token_bytes / 1024,
                        "pages": len(sizes),
                        "histogram": histogram(sizes),
                    }
                )
    return rows


def cut_sizes(model: Any, prompt_ids: Any, folder: str | None) -> dict[str, list[int]]:
    """Returns the pages of a prompt by sizing, as a cache cuts them; 16 tokens on average."""
    import torch

    from oval_adapters import attach
    from oval_core.routing.checkpoint import load_router
    from oval_core.routing.page_sizer import DynamicPageSizer

    found = {}
    for sizing in ("key_similarity", "attention_entropy"):
        routing = {"sizing": sizing, "router": "ema"}
        config = {"policy": "routed", "page_size": 16, "routing": routing}
        with attach(model, config) as oval, torch.no_grad():
            cache = oval.new_cache()
            done = model.get_decoder()(input_ids=prompt_ids[None], cache=cache, use_cache=True)
            found[sizing] = [len(page) for page in cache.paged.table.sequences[0].pages]
    hidden = done.last_hidden_state[0]
    sizers = {"dynamic untrained": DynamicPageSizer(hidden.shape[1])}
    if folder is not None:
        trained = load_router(folder).sizer
        if trained is None:
            raise SystemExit(f"{folder} holds no sizer: train one with `oval train sizer`")
        sizers["dynamic trained"] = trained
    return found | {name: sizer.sizes(hidden, 16) for name, sizer in sizers.items()}


def state_tokens(recording: Any, router: str, model: Any) -> float:
    """Returns what a router keeps of all pages, in tokens of K and V of one layer: summaries, or the history."""
    import torch

    from oval_core.routing.key_signals import create_signal

    if router == "oracle_mass":
        return 0.0
    text = model.config.get_text_config(decoder=True)
    pages = len(recording.counts)
    if router == "sketch":
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        width = create_signal("sketch", 1.0).summarise(torch.zeros(1, 2, head_dim)).shape[-1]
        return pages * width / (2 * head_dim)
    numbers = 8 * recording.mass.shape[1]  # of a `PageHistory`, float32, for all layers together
    layers = int(recording.layers_of_group.sum())
    return pages * 4 * numbers / (recording.token_bytes * layers)


def histogram(sizes: list[int]) -> dict[str, int]:
    """Returns how many pages hold 1..4, 5..8, ... 29..32 tokens."""
    counts = {f"{low}-{low + 3}": 0 for low in range(1, 32, 4)}
    for size in sizes:
        low = (size - 1) // 4 * 4 + 1
        counts[f"{low}-{low + 3}"] += 1
    return counts


def mean_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means over passages; histograms are added up."""
    total: dict[str, int] = {}
    for row in rows:
        for size, count in row["histogram"].items():
            total[size] = total.get(size, 0) + count
    names = [name for name in rows[0] if name != "histogram"]
    means = {name: round(statistics.fmean(row[name] for row in rows), 4) for name in names}
    return means | {"histogram": total}


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table to stderr."""
    names = (
        "recall",
        "recall_rest",
        "output_error",
        "tokens_allowed",
        "tokens_read",
        "state_tokens",
        "pages",
    )
    print("router sizing budget " + " ".join(names), file=sys.stderr)
    for row in sorted(rows, key=lambda row: (row["router"], row["budget"])):
        shown = " ".join(f"{row[name]:10.4g}" for name in names)
        print(f"{row['router']:12} {row['sizing']:18} {row['budget']:4} {shown}", file=sys.stderr)


def describe(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts rows and the circumstances of their measurement together."""
    import torch

    from oval_adapters.bench.machine import machine, versions

    return {
        "rows": rows,
        "hidden_size": options.hidden_size,
        "mean_size": options.mean_size,
        "dtype": options.dtype,
        "threads": options.threads,
        "repeats": options.repeats,
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()

"""Ways to compute one decode step on a CPU, side by side: attention over 30 layers, linear layers of SmolLM2-135M, for
one token and for a few.

Prints milliseconds (fastest and median of 25 turns, all forms in turn) as JSON on the last line. bf16, 9 heads over 3 KV
heads of 64; every layer has its own memory, so that caches do not flatter.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from oval_adapters.bench.machine import machine, versions
from oval_core.attention.partial import cpu_flash, mix
from oval_core.native import load_kernels

LAYERS, KV_HEADS, GROUP, DIM, TURNS = 30, 3, 3, 64, 25
ROWS = (1, 4, 16, 32)
LINEARS = ((576, 576, 60), (192, 576, 60), (1536, 576, 60), (576, 1536, 30), (49152, 576, 1))


def main() -> None:
    """Measures all forms."""
    rows = [row for length in (1024, 4096, 8192) for row in attention(length)]
    rows += [row for count in ROWS for row in linears(count)]
    result = {
        "rows": rows,
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }
    print(json.dumps(result | {"model": "shapes of smol", "dtype": "bfloat16"}))


def attention(length: int) -> list[dict[str, object]]:
    """Measures forms of attention over `length` keys."""
    stores = [
        [torch.randn(KV_HEADS, length, DIM).bfloat16() for _ in range(2)] for _ in range(LAYERS)
    ]
    query = torch.randn(1, KV_HEADS * GROUP, 1, DIM).bfloat16()
    grouped = query.view(KV_HEADS, GROUP, DIM)

    def products(k: torch.Tensor, v: torch.Tensor) -> None:
        weights = torch.softmax(
            torch.bmm(grouped, k.transpose(1, 2)) * 0.125, -1, dtype=torch.float32
        )
        torch.bmm(weights.to(v.dtype), v)

    def split(k: torch.Tensor, v: torch.Tensor) -> None:
        shape = (KV_HEADS, 2, length // 2, DIM)
        q = grouped[:, None].expand(-1, 2, -1, -1)
        out, lse = cpu_flash(q, k.view(shape), v.view(shape), 0.125, False)
        mix(out.float(), lse, 1)

    forms: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "matrix products": products,
        "flash kernel": lambda k, v: cpu_flash(grouped[None], k[None], v[None], 0.125, False),
        "flash kernel, two parts merged": split,
        "one query a head (SDPA)": lambda k, v: F.scaled_dot_product_attention(
            query, k[None], v[None], enable_gqa=True
        ),
        "C kernel": lambda k, v: load_kernels(DIM, GROUP).decode(query, k, v, 0, 0, length, 0.125),
    }
    turns = {name: lambda f=f: [f(k, v) for k, v in stores] for name, f in forms.items()}
    return [{"what": f"attention, {length} keys"} | row for row in measure(turns)]


def linears(rows: int) -> list[dict[str, object]]:
    """Measures forms of all linear layers for `rows` tokens."""
    weights = [torch.randn(o, i).bfloat16() for o, i, count in LINEARS for _ in range(count)]
    x = {i: torch.randn(1, rows, i).bfloat16() for _, i, _ in LINEARS}
    kernels = load_kernels(DIM, 1)
    turns: dict[str, Callable[[], object]] = {
        "F.linear": lambda: [F.linear(x[w.shape[1]], w) for w in weights],
        f"C kernel for few rows ({kernels.linear_path})": lambda: [
            kernels.linear(w, x[w.shape[1]], None) for w in weights
        ],
    }
    if rows == 1:
        turns["torch.mv"] = lambda: [torch.mv(w, x[w.shape[1]].view(-1)) for w in weights]
        turns["C kernel"] = lambda: [kernels.gemv(w, x[w.shape[1]], None) for w in weights]
    what = "linear layers, one token" if rows == 1 else f"linear layers, {rows} tokens"
    return [{"what": what} | row for row in measure(turns)]


def measure(turns: dict[str, Callable[[], object]]) -> list[dict[str, object]]:
    """Times every form in turn, so that the machine's drift meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(TURNS + 2):
        for name, run in turns.items():
            begin = time.perf_counter()
            run()
            if number >= 2:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return [
        {"form": name, "ms_min": round(min(t), 2), "ms_p50": round(statistics.median(t), 2)}
        for name, t in times.items()
    ]


if __name__ == "__main__":
    main()

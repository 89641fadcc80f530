"""`oval bench router`: what it costs to choose pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.router_cost_values import RouterCostSettings
from oval_adapters.cli.bench_options import AsJson, Dtype, Model

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.bench.router_cost_values import RouterCostReport

RouterName = Annotated[
    str | None,
    typer.Option(
        help="A folder with a trained router, or a name. If not given: the one that ships for the model, or new weights."
    ),
]
Pages = Annotated[int, typer.Option(help="Pages of a sequence.")]
Batch = Annotated[int, typer.Option(help="Sequences, scored one after the other.")]
Rounds = Annotated[int, typer.Option(help="Times that each part is timed.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
LayerGroups = Annotated[int, typer.Option(help="Selections a forward.")]
Seed = Annotated[int, typer.Option(help="Of contents and new weights.")]

_DEFAULTS = RouterCostSettings()


def router_command(
    model: Model = "smol",
    router: RouterName = _DEFAULTS.router,
    pages: Pages = _DEFAULTS.pages,
    batch: Batch = _DEFAULTS.batch,
    rounds: Rounds = _DEFAULTS.rounds,
    page_size: PageSize = _DEFAULTS.page_size,
    layer_groups: LayerGroups = _DEFAULTS.layer_groups,
    seed: Seed = _DEFAULTS.seed,
    dtype: Dtype = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Time a router between two forwards, and count its operations against those of the decoder."""
    from rich.console import Console

    from oval_adapters.bench.router_cost import measure_router
    from oval_adapters.load_model import load_config_of, resolve_device, resolve_dtype

    settings = RouterCostSettings(
        router=router,
        pages=pages,
        batch=batch,
        rounds=rounds,
        page_size=page_size,
        layer_groups=layer_groups,
        seed=seed,
    )
    keys = resolve_dtype(dtype, resolve_device("cpu"))
    with Console(stderr=True).status("timing"):
        report = measure_router(model, load_config_of(model), settings, keys)
    _show(Console(stderr=as_json), report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _show(console: Console, report: RouterCostReport) -> None:
    from rich import box
    from rich.table import Table

    settings = report.settings
    weights = "trained" if report.is_trained else "not trained"
    title = (
        f"router {report.router} ({weights}, {report.router_parameters:,} weights), {report.model}, {settings.pages} "
        f"pages of {settings.page_size} tokens, batch {settings.batch}, one thread, keys {report.dtype}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for place, name in enumerate(("", "ms p50", "ms p99")):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    parts = (("key signals, graph", "signals_"), ("scores", "score_"), ("choice", "choose_"), ("all", ""))  # fmt: skip
    for label, part in parts:
        times = [getattr(report, f"{part}{name}_ms") for name in ("p50", "p99")]
        table.add_row(label, *(f"{value:.3f}" for value in times))
    console.print(table)
    console.print(
        f"operations: router {report.router_flops:,}, key signals {report.signal_flops:,}, decoder "
        f"{report.decoder_flops:,} a token at {report.context} tokens; ratio {report.flops_ratio:.4%}",
        highlight=False,
    )
    if not report.is_trained and settings.router is None:
        console.print("no trained router ships for this model: new weights cost the same", style="yellow")  # fmt: skip

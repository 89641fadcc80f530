"""`oval bench fusion`: what fetching pages before a verification hides, by who predicts them and what comes first."""

from __future__ import annotations

import contextlib
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.fusion_values import DRAFTERS, ORDERS, POLICIES, FusionSettings
from oval_adapters.cli.bench_options import (
    AsJson,
    Chunk,
    Device,
    Dtype,
    Model,
    end_bench,
)
from oval_adapters.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.bench.fusion_values import FusionReport

Context = Annotated[int, typer.Option(help="Tokens of the prompt.")]
Fast = Annotated[
    str, typer.Option(help="Fast memory: a percentage of the context, or a token count.")
]
LinkGbps = Annotated[float, typer.Option(help="Bandwidth of the modelled link, GB/s.")]
Policy = Annotated[
    str, typer.Option(help=f"What verifications read, with commas: {', '.join(POLICIES)}.")
]
Order = Annotated[
    str, typer.Option(help=f"Orders of fusion, with commas: {', '.join(ORDERS)}, or all.")
]
Drafter = Annotated[str, typer.Option(help=f"Whose drafts are replayed: {' or '.join(DRAFTERS)}.")]
Heads = Annotated[str, typer.Option(help="Heads of medusa: auto, a shipped name or a folder.")]
SelfBudget = Annotated[int, typer.Option(help="Tokens that self reads while drafting.")]
BudgetShare = Annotated[
    float, typer.Option(help="Share of the text that verifications read under routed and guarded.")
]
Router = Annotated[str, typer.Option(help="Predicts pages: auto, a router's name or a folder.")]
MostPages = Annotated[
    int | None,
    typer.Option(
        help="Pages that come back into the pool before a verification at most. 16 if not given, and none where "
        "verifications read everything."
    ),
]
Depth = Annotated[int, typer.Option(help="Tokens of a draft.")]
NewTokens = Annotated[int, typer.Option(help="Tokens decoded in each run.")]
Rounds = Annotated[int, typer.Option(help="Times that each order runs; the median stall is shown.")]

_DEFAULTS = FusionSettings()


def fusion_command(
    model: Model = "smol",
    context: Context = _DEFAULTS.context,
    fast: Fast = _DEFAULTS.fast,
    link_gbps: LinkGbps = _DEFAULTS.link_gbps,
    policy: Policy = ",".join(_DEFAULTS.policies),
    order: Order = "all",
    drafter: Drafter = _DEFAULTS.drafter,
    heads: Heads = _DEFAULTS.heads,
    self_budget: SelfBudget = _DEFAULTS.self_budget,
    budget_share: BudgetShare = _DEFAULTS.budget_share,
    router: Router = _DEFAULTS.router,
    most_pages: MostPages = None,
    depth: Depth = _DEFAULTS.depth,
    new_tokens: NewTokens = _DEFAULTS.new_tokens,
    chunk: Chunk = _DEFAULTS.chunk,
    rounds: Rounds = _DEFAULTS.rounds,
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time what verifications wait for pages, by the order in which both sides' predictions are fetched."""
    from rich.console import Console

    from oval_adapters.load_model import load_model, load_tokenizer

    errors = Console(stderr=True)
    settings = FusionSettings(
        context=context,
        fast=fast,
        link_gbps=link_gbps,
        policies=tuple(dict.fromkeys(policy.split(","))),
        orders=ORDERS if order == "all" else tuple(dict.fromkeys(order.split(","))),
        drafter=drafter,
        heads=heads,
        self_budget=self_budget,
        budget_share=budget_share,
        router=router,
        most_pages=most_pages,
        depth=depth,
        new_tokens=new_tokens,
        chunk=chunk,
        rounds=rounds,
    )
    with errors.status(f"loading {model}"):
        tokenizer, loaded = load_tokenizer(model), load_model(model, dtype, device)
    report, whole = _measure(errors, model, loaded, tokenizer, settings)
    _show(Console(stderr=as_json), report)
    end_bench(errors, report.to_dict(), as_json=as_json, whole=whole)


def _measure(
    console: Console,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: FusionSettings,
) -> tuple[FusionReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the policies that are done."""
    from oval_adapters.bench.fusion import describe, measure_fusion, num_ticks

    rows, drafts, whole = [], [], False
    with progress_bar(console, num_ticks(settings)) as tick, contextlib.suppress(KeyboardInterrupt):
        for made, found in measure_fusion(model, tokenizer, settings, tick):
            drafts.append(made)
            rows += found
        whole = True
    return describe(name, model, settings, rows, drafts), whole


def _show(console: Console, report: FusionReport) -> None:
    """Prints a table for each policy."""
    from rich import box
    from rich.table import Table

    settings = report.settings
    console.print(
        f"fusion, {report.model}, {report.dtype}, {report.device}, {report.threads} threads, {settings.context} tokens, "
        f"{settings.fast} fast, {report.link} {settings.link_gbps:g} GB/s",
        style="italic",
        highlight=False,
        soft_wrap=True,
    )
    made = {drafts.policy: drafts for drafts in report.drafts}
    for policy, rows in groupby(report.rows, key=lambda row: row.policy):
        drafts = made[policy]
        states = "" if drafts.has_states else ", without states"
        title = (
            f"{policy}: drafts of {drafts.drafter}{states}, {drafts.tau:.2f} tokens a step, {drafts.draft_ms:.0f} ms; all in "
            f"fast memory a verification takes {drafts.verify_ms:.0f} ms"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=0)
        names = (
            "order",
            "waits",
            "stall",
            "promote",
            "predict",
            "verify",
            "pool",
            "hits",
            "MB",
            "wasted",
        )
        for column in (*names, "pages", "both", "tokens"):
            table.add_column(column, justify="left" if column == "order" else "right", no_wrap=True)
        for row in rows:
            times = (row.waiting_ms, row.stall_ms, row.promotion_ms, row.prepare_ms, row.verify_ms)
            moved = row.bytes_prefetched + row.bytes_demanded + row.bytes_loaded
            table.add_row(
                row.order,
                *(f"{value:.1f}" for value in times),
                f"{row.resident_share:.1%}",
                f"{row.hit_rate:.1%}",
                *(f"{value / row.steps / 1e6:.1f}" for value in (moved, row.bytes_wasted)),
                f"{row.predicted:.1f}",
                f"{row.common:.1f}",
                "identical" if row.identical else "differ",
            )
        console.print(table)
    console.print(
        "ms and MB of a step; waits: stall and promote; promote: pages that come back into the pool before it; "
        "predict: scoring pages on both sides, and bringing them back; "
        "pool: pages to be read that were there before; hits: page reads of layers that waited for nothing; none: what the "
        "tiers do by themselves; demand: nothing ahead; tokens: compared with everything in fast memory",
        style="dim",
    )
    for line in report.findings:
        console.print(line, highlight=False, soft_wrap=True)

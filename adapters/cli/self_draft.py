"""`oval bench self-draft`: acceptance of drafts by the model itself, by what they read of its cache."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.self_draft_values import KINDS, SelfDraftSettings
from oval_adapters.cli.bench_options import (
    AsJson,
    Chunk,
    Device,
    Dtype,
    Model,
    end_bench,
    parse_numbers,
)
from oval_adapters.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.bench.self_draft_values import SelfDraftReport

Data = Annotated[list[Path], typer.Option(help="Text files, as for `oval bench recall`.")]
Context = Annotated[str, typer.Option(help="Tokens of the prompts, a list with commas.")]
Kinds = Annotated[str, typer.Option(help=f"Sorts of passages, with commas: {', '.join(KINDS)}.")]
Passages = Annotated[int, typer.Option(help="Passages of each kind, at each context.")]
Budget = Annotated[str, typer.Option(help="Tokens that drafts read, a list with commas.")]
Policy = Annotated[str, typer.Option(help="What drafts read, with commas: routed, window.")]
Router = Annotated[str, typer.Option(help="Of routed drafts: auto, a router's name or a folder.")]
Depth = Annotated[int, typer.Option(help="Tokens of a draft.")]
NewTokens = Annotated[int, typer.Option(help="Tokens decoded after each prompt.")]
Seed = Annotated[int, typer.Option(help="Of passages and intervals.")]


def self_draft_command(
    data: Data,
    model: Model = "smol",
    context: Context = "2048,4096,8000",
    kinds: Kinds = ",".join(KINDS),
    passages: Passages = 2,
    budget: Budget = "256",
    policy: Policy = "routed,window",
    router: Router = "auto",
    depth: Depth = 5,
    new_tokens: NewTokens = 64,
    chunk: Chunk = 512,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare drafts that read routed pages with drafts that read first and last tokens, at equal budgets."""
    from rich.console import Console

    from oval_adapters.load_model import load_model, load_tokenizer

    errors = Console(stderr=True)
    settings = SelfDraftSettings(
        data=tuple(map(str, data)),
        contexts=parse_numbers("context", context),
        kinds=tuple(dict.fromkeys(kinds.split(","))),
        passages=passages,
        budgets=parse_numbers("budget", budget),
        policies=tuple(dict.fromkeys(policy.split(","))),
        router=router,
        depth=depth,
        new_tokens=new_tokens,
        chunk=chunk,
        seed=seed,
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
    settings: SelfDraftSettings,
) -> tuple[SelfDraftReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the rows that are done."""
    from oval_adapters.bench.self_draft import describe, measure_self_draft, num_ticks

    rows, whole = [], False
    with progress_bar(console, num_ticks(settings)) as tick, contextlib.suppress(KeyboardInterrupt):
        for row in measure_self_draft(model, tokenizer, settings, tick):
            rows.append(row)
        whole = True
    return describe(name, model, settings, rows), whole


def _show(console: Console, report: SelfDraftReport) -> None:
    from rich import box
    from rich.table import Table

    title = f"self-draft, {report.model}, {report.dtype}, {report.device}, {report.threads} threads, chains of {report.settings.depth}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=0)
    names = ("context", "kind", "policy", "budget", "accepted", "tau", "by position", "draft", "verify", "tokens")  # fmt: skip
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            str(row.context),
            row.kind,
            row.policy,
            str(row.budget),
            f"{row.acceptance:.1%}",
            f"{row.tau:.2f}",
            " ".join(f"{share:.2f}" for share in row.accepted_by_position),
            f"{row.draft_ms:.0f}",
            f"{row.verify_ms:.0f}",
            "identical" if row.identical else "differ",
        )
    console.print(table)
    console.print(
        "accepted: of drafted tokens; tau: tokens a verification, the bonus included; ms of a draft and of a verification; "
        "tokens: compared with plain decoding",
        style="dim",
    )
    for gain in report.gains:
        spread = (
            ""
            if gain.interval is None
            else f" ({gain.interval[0]:+.3f} .. {gain.interval[1]:+.3f})"
        )
        console.print(
            f"{gain.context} tokens, budget {gain.budget}: routed accepts {gain.routed_acceptance:.1%}, window-only "
            f"{gain.window_acceptance:.1%}: {gain.gain:+.3f}{spread}",
            highlight=False,
            soft_wrap=True,
        )

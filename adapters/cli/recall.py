"""`oval bench recall`: how well routers choose pages, replayed on recorded attention and in a model that decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.bench.recall_values import RecallSettings, parse_shares
from oval_adapters.cli.bench_options import (
    AsJson,
    Dtype,
    Model,
    end_bench,
    parse_numbers,
)
from oval_adapters.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.bench.recall_values import RecallReport

Data = Annotated[
    list[str],
    typer.Option(help="A file with texts: .txt or .jsonl, also with .gz. May be given several times."),
]  # fmt: skip
Context = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Steps = Annotated[int, typer.Option(help="Tokens that follow it.")]
Passages = Annotated[int, typer.Option(help="Passages of each kind.")]
Kinds = Annotated[str, typer.Option(help="Sorts of text, with commas: text, retrieval, chat.")]
Budgets = Annotated[
    str, typer.Option(help="Shares of the text that a layer reads, with commas, such as 5%,10%.")
]
Lead = Annotated[str, typer.Option(help="Steps for which a selection stands, with commas.")]
Routers = Annotated[
    str, typer.Option(help="Names or folders of routers, with commas; all stands for every name.")
]
Loop = Annotated[
    str, typer.Option(help="What a replayed router sees: closed (what it read), open, or both.")
]
Replay = Annotated[bool, typer.Option(help="Replay every signal on recorded attention.")]
Decode = Annotated[bool, typer.Option(help="Also decode with the routers: perplexity, passkeys.")]
DecodeLead = Annotated[str, typer.Option(help="As --lead, for decoding.")]
PasskeyContext = Annotated[str, typer.Option(help="Tokens of prompts with passkeys, with commas.")]
Passkeys = Annotated[int, typer.Option(help="Passkey cases of each flavour and length; 0: none.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
DenseLayers = Annotated[
    str, typer.Option(help="Layers that read everything, with commas; empty for none.")
]
LayerGroups = Annotated[int, typer.Option(help="Selections a forward; neighbours share one.")]
Sinks = Annotated[int, typer.Option(help="First tokens that are always read.")]
Window = Annotated[int, typer.Option(help="Last tokens that are always read.")]
SecondLook = Annotated[
    float, typer.Option(help="Share of the budget that a layer's own query spends, while decoding.")
]
Seed = Annotated[int, typer.Option(help="Of passages and intervals.")]
PlotFolder = Annotated[
    Path | None, typer.Option(help="Also draw .png files to this folder (needs matplotlib).")
]

_DEFAULTS = RecallSettings(data=("-",))


def recall_command(
    data: Data,
    model: Model = "smol",
    context: Context = _DEFAULTS.context,
    budgets: Budgets = "5%,10%,20%,40%",
    lead: Lead = ",".join(map(str, _DEFAULTS.leads)),
    kinds: Kinds = ",".join(_DEFAULTS.kinds),
    passages: Passages = _DEFAULTS.passages,
    steps: Steps = _DEFAULTS.steps,
    seed: Seed = _DEFAULTS.seed,
    routers: Routers = ",".join(_DEFAULTS.routers),
    loop: Loop = _DEFAULTS.loops[0],
    replay: Replay = _DEFAULTS.replays,
    decode: Decode = _DEFAULTS.decode,
    decode_lead: DecodeLead = ",".join(map(str, _DEFAULTS.decode_leads)),
    passkey_context: PasskeyContext = ",".join(map(str, _DEFAULTS.passkey_contexts)),
    passkeys: Passkeys = _DEFAULTS.passkeys,
    page_size: PageSize = _DEFAULTS.page_size,
    dense_layers: DenseLayers = ",".join(map(str, _DEFAULTS.dense_layers)),
    layer_groups: LayerGroups = _DEFAULTS.layer_groups,
    sinks: Sinks = _DEFAULTS.num_sink_tokens,
    window: Window = _DEFAULTS.window_size,
    second_look: SecondLook = _DEFAULTS.second_look,
    dtype: Dtype = "bfloat16",
    plot: PlotFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare routers: the attention they would have covered, then perplexity and answers of a model that uses them."""
    from rich.console import Console

    errors = Console(stderr=True)
    settings = RecallSettings(
        data=tuple(data),
        context=context,
        steps=steps,
        passages=passages,
        kinds=tuple(kinds.split(",")),
        budgets=parse_shares("budgets", budgets),
        leads=parse_numbers("lead", lead),
        routers=tuple(dict.fromkeys(routers.split(","))),
        loops=("closed", "open") if loop == "both" else (loop,),
        replays=replay,
        decode=decode,
        decode_leads=parse_numbers("decode-lead", decode_lead),
        passkey_contexts=parse_numbers("passkey-context", passkey_context),
        passkeys=passkeys,
        seed=seed,
        page_size=page_size,
        dense_layers=parse_numbers("dense-layers", dense_layers) if dense_layers else (),
        layer_groups=layer_groups,
        num_sink_tokens=sinks,
        window_size=window,
        second_look=second_look,
    )
    _run(errors, model, settings, dtype, plot, as_json)


def _run(
    errors: Console,
    model: str,
    settings: RecallSettings,
    dtype: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    with errors.status(f"loading {model}"):
        loaded, tokenizer = _prepare(model, settings, dtype, plot)
    report, whole = _measure(errors, model, loaded, tokenizer, settings)
    _show(Console(stderr=as_json), report)
    if plot is not None:
        _draw(errors, report, plot)
    end_bench(errors, report.to_dict(), as_json=as_json, whole=whole)


def _prepare(
    model: str, settings: RecallSettings, dtype: str, plot: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model, once all that could be wrong without it is known to be right."""
    from oval_adapters.bench.closed_loop_passkeys import check_passkeys, make_cases
    from oval_adapters.bench.recall import check_settings, held_out_passages
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer

    if plot is not None:
        from oval_adapters.bench.recall_plot import check_plot_folder

        check_plot_folder(plot)
    config = load_config_of(model)
    check_settings(config, settings)
    check_passkeys(config, settings)
    tokenizer = load_tokenizer(model)
    for kind in settings.kinds:
        held_out_passages(tokenizer, settings, kind)
    if settings.decode:
        make_cases(tokenizer, settings)
    return load_model(model, dtype, "cpu"), tokenizer


def _measure(
    console: Console,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
) -> tuple[RecallReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the rows that are done."""
    from oval_adapters.bench import closed_loop, closed_loop_passkeys, recall

    phases: list[tuple[bool, Callable[..., Iterable[Any]], Callable[..., int]]] = [
        (settings.replays, recall.measure_recall, recall.num_ticks),
        (settings.decode, closed_loop.measure_closed_loop, closed_loop.num_loop_ticks),
        (settings.decode, closed_loop_passkeys.measure_passkeys, closed_loop_passkeys.num_passkey_ticks),
    ]  # fmt: skip
    found: list[list[Any]] = [[], [], []]
    whole = False
    with contextlib.suppress(KeyboardInterrupt):  # the rows so far are kept and shown
        for rows, (is_asked, measure, num_ticks) in zip(found, phases, strict=True):
            if not is_asked:
                continue
            with progress_bar(console, num_ticks(model, settings)) as tick:
                for row in measure(model, tokenizer, settings, tick):
                    rows.append(row)
        whole = True
    return recall.describe(name, model, settings, *found), whole


def _show(console: Console, report: RecallReport) -> None:
    from oval_adapters.bench.recall_tables import (
        LEGEND,
        loop_tables,
        passkey_tables,
        recall_tables,
    )

    settings = report.settings
    console.print(
        f"recall, {report.model}, {report.dtype}, {report.threads} threads, context {settings.context}, "
        f"{settings.steps} steps, {settings.passages} passages a kind, seed {settings.seed}",
        style="italic",
        highlight=False,
        soft_wrap=True,
    )
    for tables, legend in ((recall_tables, LEGEND[0]), (loop_tables, LEGEND[1]), (passkey_tables, "")):  # fmt: skip
        shown = list(tables(report))
        for table in shown:
            console.print(table)
        if shown and legend:
            console.print(legend, style="dim")


def _draw(console: Console, report: RecallReport, folder: Path) -> None:
    from oval_adapters.bench.recall_plot import draw_recall

    for path in draw_recall(report, folder):
        console.print(f"drawn to {path}", style="dim", markup=False, soft_wrap=True)

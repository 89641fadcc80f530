"""`oval bench parity`: does OVAL give the same tokens as plain Hugging Face, on this model?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.tier_options import TierOptions, check_for_model

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.bench.parity import ParityRow

Model = Annotated[str, typer.Option("--model", help="smol, a folder, or a hub id OWNER/NAME.")]
Dtype = Annotated[str, typer.Option(help="float32 proves equality; bfloat16 shows near-ties.")]
Tokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens a prompt.")]
Document = Annotated[
    Path | None,
    typer.Option(help="UTF-8 text for the long prompt; without it, a diary written for this."),
]
Cases = Annotated[str | None, typer.Option(help="Only cases whose name holds this text.")]
Backend = Annotated[str, typer.Option(help="OVAL's attention backend.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]

_DOCUMENT_TOKENS = 2048


def parity_command(
    model: Model = "smol",
    dtype: Dtype = "float32",
    max_new_tokens: Tokens = 64,
    document: Document = None,
    cases: Cases = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
    tiers: TierOptions = TierOptions(),
) -> None:
    """Generate with and without OVAL and compare: chat, code, a long document, batches, beams, sampling."""
    from rich.console import Console
    from rich.progress import track

    from oval_adapters.bench.machine import machine, versions
    from oval_adapters.bench.parity import compare
    from oval_adapters.bench.tier_facts import tier_facts
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer
    from oval_core.config import OvalConfig
    from oval_core.errors import ConfigError

    if max_new_tokens < 1:
        raise ConfigError(
            f"max-new-tokens: got {max_new_tokens}. Allowed: 1 or more. Choose such a value."
        )
    config = tiers.apply(OvalConfig(backend=backend))
    facts = tier_facts(config.tiers)
    errors = Console(stderr=True)
    with errors.status(f"loading {model}"):
        check_for_model(config, load_config_of(model))
        loaded, tokenizer = load_model(model, dtype, "auto"), load_tokenizer(model)
    chosen = _choose(tokenizer, document, cases)
    rows = [
        compare(loaded, tokenizer, case, max_new_tokens, config)
        for case in track(chosen, "comparing", console=errors, transient=True)
    ]
    _show(Console(stderr=as_json), rows, facts)
    if as_json:
        report = {
            "rows": [row.to_dict() for row in rows],
            "identical": sum(row.identical for row in rows),
            "model": model,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "max_new_tokens": max_new_tokens,
            "tiers": facts,
            "versions": versions(),
            "machine": machine(loaded.device),
        }
        typer.echo(json.dumps(report))


def _choose(tokenizer: Any, document: Path | None, cases: str | None) -> list[Any]:
    from oval_adapters.bench.prompts import long_text, parity_cases
    from oval_core.errors import ConfigError

    try:
        text = long_text() if document is None else document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"document: cannot read {document}: {error}. Allowed: a UTF-8 text file. Check the path."
        ) from error
    ids = tokenizer(text, verbose=False)["input_ids"][:_DOCUMENT_TOKENS]
    every = parity_cases(tokenizer, tokenizer.decode(ids, skip_special_tokens=True))
    chosen = [case for case in every if cases is None or cases in case.name]
    if not chosen:
        raise ConfigError(
            f"cases: no name holds {cases!r}. Allowed: part of {'; '.join(c.name for c in every)}. "
            "Choose one, or leave it out."
        )
    return chosen


def _show(console: Console, rows: list[ParityRow], tiers: dict[str, Any] | None) -> None:
    from rich.table import Table

    from oval_adapters.bench.tier_facts import tier_line

    table = Table(
        "case", "prompt", "new", "tokens", "largest logit difference", "first at", "margin"
    )
    for row in rows:
        diff = "" if row.max_logit_diff is None else f"{row.max_logit_diff:.1e}"
        where = "" if row.first_divergence is None else str(row.first_divergence)
        margin = "" if row.margin is None else f"{row.margin:.3g}"
        verdict = "identical" if row.identical else "differ"
        table.add_row(
            row.name, str(row.prompt_tokens), str(row.new_tokens), verdict, diff, where, margin
        )
    console.print(table)
    same = sum(row.identical for row in rows)
    tiered = "" if tiers is None else f", OVAL tiered: {tier_line(tiers)}"
    verdict = f"{same} of {len(rows)} cases token-identical to Hugging Face{tiered}"
    console.print(verdict, highlight=False, soft_wrap=True)
    if same < len(rows):
        console.print(
            "first at: step where a text parts; margin: Hugging Face's gap there between its two best logits (a "
            "near-tie in bfloat16 is rounding, a wide gap is a fault)",
            style="dim",
        )

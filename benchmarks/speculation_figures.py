"""Tables of draft heads, page fusion and sparse self-drafts, made from records. Called by render_figures.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from acceptance_figures import render_acceptance

Result = dict[str, Any]

_NODES = ("3", "7", "15", "31", "63")


def render_heads(result: Result) -> str:
    """Returns what a training of draft heads gave."""
    last = result["curve"][-1]
    depths = range(len(last["top1"]))
    lines = [
        "| head | " + " | ".join(str(depth + 1) for depth in depths) + " |",
        "|---" * (len(depths) + 1) + "|",
        "| right token first | " + " | ".join(f"{share:.3f}" for share in last["top1"]) + " |",
        "| among the first 5 | " + " | ".join(f"{share:.3f}" for share in last["top5"]) + " |",
        "",
        "| nodes drafted | " + " | ".join(_NODES) + " |",
        "|---" * (len(_NODES) + 1) + "|",
        "| tokens a step, fixed tree | "
        + " | ".join(f"{last['tau'][nodes]:.2f}" for nodes in _NODES)
        + " |",
        "",
        f"  {result['positions']} positions learnt from, {result['held_out_positions']} held out by prompt; "
        f"{result['draft_tokens']} draft tokens cover {result['coverage']:.1%} of held-out tokens; "
        f"{result['file_bytes'] / 1e6:.1f} MB.",
    ]
    return "\n".join(lines)


def render_fusion(result: Result) -> str:
    """Returns the table of `oval bench fusion`."""
    lines = [
        "| policy | order | waits a step, ms | stall | promotion | predicting, ms | pages found in fast memory | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        waits = row["stall_ms"] + row["promotion_ms"]
        lines.append(
            f"| {row['policy']} | {row['order']} | **{waits:.1f}** | {row['stall_ms']:.1f} | {row['promotion_ms']:.1f} "
            f"| {max(0.0, row['prepare_ms'] - row['promotion_ms']):.1f} | {row['hit_rate']:.1%} "
            f"| {'identical' if row['identical'] else 'differ'} |"
        )
    lines.append(f"\n  Link: {result['link']}.")
    return "\n".join(lines)


def render_self_draft(result: Result) -> str:
    """Returns the table of `oval bench self-draft`."""
    lines = [
        "| context | budget, tokens | window only: accepted | routed pages: accepted | gain (95 %) |",
        "|---|---|---|---|---|",
    ]
    for row in result["gains"]:
        spread = row["interval"]
        shown = "" if spread is None else f" ({spread[0]:+.1%} to {spread[1]:+.1%})"
        lines.append(
            f"| {row['context']} | {row['budget']} | {row['window_acceptance']:.1%} | {row['routed_acceptance']:.1%} "
            f"| {row['gain']:+.1%}{shown} |"
        )
    return "\n".join(lines)


def render_token_identity(result: Result) -> str:
    """Returns how many texts were Hugging Face's, by drafter and by what else was asked."""
    drafters = list(dict.fromkeys(name for own in result["decoded"].values() for name in own))
    lines = [
        "| identical to Hugging Face | " + " | ".join(f"`{name}`" for name in drafters) + " |",
        "|---" * (len(drafters) + 1) + "|",
    ]
    for what, decoded in result["decoded"].items():
        same = result["identical"][what]
        cells = [f"{same[n]} of {decoded[n]}" if n in decoded else "" for n in drafters]
        lines.append(f"| {what.replace('_', ' ')} | " + " | ".join(cells) + " |")
    forwards = result["forwards"]["plain"]
    told = ", ".join(f"`{name}` {count}" for name, count in forwards.items())
    lines.append(
        f"\n  Forwards of the first row's batches: {told}. Greedy, {result['dtype']}, batches of {result['batch_size']}, {result['max_new_tokens']} tokens each."
    )
    return "\n".join(lines)


SPECULATION: Mapping[str, Callable[[Result], str]] = {
    "acceptance": render_acceptance,
    "fusion": render_fusion,
    "heads": render_heads,
    "self_draft": render_self_draft,
    "token_identity": render_token_identity,
}

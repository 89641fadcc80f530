"""Tables of budgets of image tokens and of decode routing on albums, made from records. Called by render_figures.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

SHARE = 0.33
"""Budget of the targets: so much of the image tokens is to keep `KEPT` of dense's accuracy, at `FASTER` on albums."""

KEPT, FASTER = 0.99, 1.27
_PLAIN = ("clip", "feature-norm", "key-mean", "uniform", "random", "downsample")
_RIVALS = ("dense", "random", "uniform", "downsample")
_ALBUM = 2
"""Pictures a question from which a table is one of albums."""


def render_image_budgets(result: Result) -> str:
    """Returns a table of every budget and router for each table of questions, and what came out."""
    return "\n\n".join(_table(table, result) for table in result["tables"])


def judged_at(table: Result, result: Result) -> Result | None:
    """Returns the row that the targets are judged by: the first router that was listed, a trained one if there is any.

    It is named before the run, not picked by what came out; `random` and `downsample` are controls and never taken.
    """
    near = {row["router"]: row for row in table["rows"] if abs(row["budget"] - SHARE) < 0.02}
    listed = [name for name in result["routers"] if name not in ("random", "downsample")]
    listed = [*_trained(result), *listed]
    return next((near[name] for name in listed if name in near), None)


def render_image_decode(result: Result) -> str:
    """Returns the table of image_budgets.py --decode, and what came out."""
    lines = [
        "| policy | tokens read | ms a token | time over full | attention that is read | of image pages | same next token | same answers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        share = "all" if row["share"] is None else f"{row['share']:.0%}"
        lines.append(
            f"| {row['policy']} | {share} | {row['ms']:.1f} | **{row['ratio']:.2f}** | {row['recall']:.1%} "
            f"| {row['image_recall']:.1%} | {row['agreement']:.1%} | {row['identical']} of {result['albums']} |"
        )
    routed = [row for row in result["rows"] if row["share"] is not None]
    faster = [f"{row['share']:.0%}" for row in routed if row["ratio"] < 1]
    said = (
        f"faster than full attention at {', '.join(faster)}"
        if faster
        else "never faster than full attention"
    )
    lines.append(
        f"\n  {result['albums']} albums described in {result['new_tokens']} tokens after prompts of about {result['prompt_tokens']}; "
        f"router `{result['router']}`. Every policy reads the same text, that of full attention. Routed decoding is {said} here."
    )
    return "\n".join(lines)


def _table(table: Result, result: Result) -> str:
    dense = next(row for row in table["rows"] if row["router"] == "dense")
    lines = [
        f"  **{table['name']}**: {table['questions']} questions, {_pictures(table['pictures'])}, {table['image_tokens']:.0f} image "
        f"tokens. Dense: {_percent(dense)} right, {dense['ms']:.0f} ms a question.",
        "",
        "| budget | router | read | right, % (95 %) | of dense's (95 %) | p: dense | random | uniform | downsampled | ms | times as fast (95 %) | choosing |",
        "|---" * 12 + "|",
    ]
    shown = [row for row in table["rows"] if row["router"] != "dense"]
    for row in sorted(shown, key=lambda row: (-row["budget"], _rank(row, result))):
        lines.append(_line(row))
    lines.append(f"\n  {_verdict(table, dense, result)}")
    return "\n".join(lines)


def _line(row: Result) -> str:
    against = [
        f"{row['against'][name]['p_value']:.2g}" if name in row["against"] else ""
        for name in _RIVALS
    ]
    if row["router"] == "downsample":
        times = ["", "not shortened", ""]
    else:
        low, high = row["ratio_interval"]
        fast = f"**{1 / row['ratio']:.2f}** ({1 / high:.2f}-{1 / low:.2f})"
        times = [f"{row['ms']:.0f}", fast, f"{row['router_share']:.1%}"]
    cells = [f"{row['budget']:.0%}", row["router"], f"{row['read_share']:.0%}", _percent(row), _relative(row), *against, *times]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _verdict(table: Result, dense: Result, result: Result) -> str:
    row = judged_at(table, result)
    if row is None or row["relative"] is None:
        return "No budget of 33 % was measured, or dense is never right."
    low, high = row["relative_interval"]
    kept = "kept" if row["relative"] >= KEPT else "missed"
    sure = "" if low >= KEPT else ", by its interval not certain" if high >= KEPT else ", also by its interval"  # fmt: skip
    words = [
        f"At {row['budget']:.0%} of the image tokens `{row['router']}` keeps {row['relative']:.1%} of dense's accuracy "
        f"(95 %: {low:.1%}-{high:.1%}; {row['against']['dense']['only_second']} questions lost, "
        f"{row['against']['dense']['only_first']} won): the target of {KEPT:.0%} is {kept}{sure}."
    ]
    if table["pictures"] >= _ALBUM:
        fast = 1 / row["ratio"]
        met = "met" if fast >= FASTER else "missed"
        words.append(f"It answers {fast:.2f} times as fast as dense: the target of {FASTER} is {met}.")  # fmt: skip
    words.append(f"Choosing takes {row['router_share']:.1%} of its time.")
    words += _inits(table, result)
    if dense["circular"] is not None:
        words.append(f"Right in every order: dense {dense['circular']:.1%}, `{row['router']}` {row['circular']:.1%}.")  # fmt: skip
    return " ".join(words)


def _inits(table: Result, result: Result) -> list[str]:
    """Returns how trained routers compare with one another, budget by budget; nothing for one alone."""
    trained = _trained(result)
    if len(trained) < 2:
        return []
    found = []
    for budget in sorted({row["budget"] for row in table["rows"] if row["router"] in trained}):
        own = {r["router"]: r["accuracy"] for r in table["rows"] if r["budget"] == budget}
        told = ", ".join(f"{name} {own[name]:.1%}" for name in trained if name in own)
        found.append(f"{budget:.0%}: {told}")
    return [f"Trained routers by how they began: {'; '.join(found)}."]


def _trained(result: Result) -> list[str]:
    return [name for name in result["routers"] if name not in _PLAIN]


def _rank(row: Result, result: Result) -> int:
    order = [*_trained(result), *_PLAIN]
    return order.index(row["router"])


def _percent(row: Result) -> str:
    low, high = row["interval"]
    return f"{100 * row['accuracy']:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def _relative(row: Result) -> str:
    if row["relative"] is None or any(map(math.isnan, row["relative_interval"])):
        return ""
    low, high = row["relative_interval"]
    return f"{row['relative']:.3f} ({low:.2f}-{high:.2f})"


def _pictures(count: float) -> str:
    return "one picture each" if count == 1 else f"{count:.0f} pictures each"


IMAGES: dict[str, Callable[[Result], str]] = {
    "image_budgets": render_image_budgets,
    "image_decode": render_image_decode,
}

"""The demo's figures in words, once for the terminal and the page: the same number reads the same in both. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["acceptance_line", "answer_lines", "away", "forwards", "number", "orders", "percent", "sample_line", "truth"]  # fmt: skip

_MB = 1e6


def number(value: float | None, places: int = 2) -> str:
    """Returns a number; a dash where there is none."""
    return "-" if value is None else f"{value:.{places}f}"


def percent(share: float | None) -> str:
    """Returns a share in per cent; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def forwards(own: Mapping[str, Any]) -> str:
    """Returns how many tokens came with how many forwards. The prompt's forward brings the first and is no step."""
    first, *later = own["arrivals"] or [0]
    head = f"{own['tokens']} tokens: {first} by the prompt's forward"
    if not later:
        return head
    rate = sum(later) / len(later)
    return f"{head}, {sum(later)} in {len(later)} forwards after it = {number(rate)} tokens a forward"  # fmt: skip


def away(own: Mapping[str, Any]) -> str:
    """Returns what did not fit into fast memory, and what was brought from outside."""
    brought = own["bytes_prefetched"] + own["bytes_demanded"] + own["bytes_loaded"]
    return (
        f"{own['most_pages_away']} of {own['pages_then']} pages outside of fast memory at most, "
        f"{brought / _MB:.1f} MB brought in"
    )


def truth(own: Mapping[str, Any]) -> str | None:
    """Returns what the picture really shows; None where nobody knows."""
    if not own.get("shows"):
        return None
    judged = {None: "", True: ": the answer is right", False: ": the answer is not that"}
    return f"what the picture really shows: {own['shows']}{judged[own.get('is_right')]}"


def orders(own: Mapping[str, Any]) -> str:
    """Returns in how many orders of their options questions were asked."""
    if own["circular"] is None:
        return "in one order of their options"
    return f"each in {own['orders']} orders of its options"


def answer_lines(own: Mapping[str, Any]) -> list[str]:
    """Returns the answer and what is told about it, for the terminal."""
    lines = [f"{own['model']}: {own['answer']}", truth(own) or ""]
    lines.append(f"{forwards(own)} (drafted by {own['drafter']})")
    hits = "" if own["page_hit_rate"] is None else f"; {percent(own['page_hit_rate'])} of page reads found the page in fast memory"  # fmt: skip
    share = "" if own["image_share"] is None else f"; {percent(own['image_share'])} of the attention on the picture"  # fmt: skip
    lines.append(
        f"{own['image_pages']} pages of the picture, {own['text_pages']} of text; {away(own)}, waited {1e3 * own['stall_s']:.0f} ms{hits}{share}"
    )
    return [line for line in lines if line]


def sample_line(own: Mapping[str, Any]) -> str:
    """Returns what the sample gave, for the terminal."""
    circular = "" if own["circular"] is None else f", {percent(own['circular'])} in all {own['orders']} orders of the options"  # fmt: skip
    return (
        f"MMBench-style sample of {own['questions']} questions: {percent(own['vanilla'])} right as they stand (guessing: 25 %)"
        f"{circular}; too few to rank models by"
    )


def acceptance_line(own: Mapping[str, Any]) -> str:
    """Returns what drafts gave, for the terminal."""
    return (
        f"drafts ({own['model']}, {own['drafter']}): {number(own['tau'])} tokens a forward, "
        f"{number(own['speedup'])} times the speed of plain decoding, over {own['prompts']} prompts"
    )

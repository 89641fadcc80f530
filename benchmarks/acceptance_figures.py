"""Tables of acceptance and speed of drafters, made from the record of `oval eval acceptance`. Called by render_figures.py."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]


def render_acceptance(result: Result) -> str:
    """Returns the table of all drafters, then tau and speed-up by category."""
    drafters = {result["drafter"]: result, **result["drafters"]}
    lines = [
        "| drafter | tau (95 %) | accepted at 1 / 2 / 3 / 4 | of proposed | tokens/s | speed-up (95 %) | identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, side in drafters.items():
        shares = " / ".join(f"{share:.2f}" for share in side["accepted_by_position"][:4])
        rate = side["draft_acceptance_rate"]
        lines.append(
            f"| `{label}` | **{side['tau']:.2f}** {_spread(side['tau_interval'])} | {shares} "
            f"| {'' if rate is None else f'{rate:.0%}'} | {side['tokens_per_s']:.1f} "
            f"| **{side['speedup']:.2f}** {_spread(side['speedup_interval'])} | {_identical(side)} |"
        )
    plain = result["baselines"]["plain"]
    lines.append(f"| plain decoding on OVAL | 1 | | | {plain['tokens_per_s']:.1f} | 1 | |")
    if "hf" in result["baselines"]:
        hf = result["baselines"]["hf"]
        lines.append(f"| plain Hugging Face | 1 | | | {hf['tokens_per_s']:.1f} | {hf['speedup']:.2f} | {_identical(hf)} |")  # fmt: skip
    return "\n".join([*lines, "", *_by_category(drafters)])


def _by_category(drafters: dict[str, Result]) -> list[str]:
    names = list(next(iter(drafters.values()))["tau_by_category"])
    lines = [
        "| tau (speed-up) | " + " | ".join(name.replace("_", " ") for name in names) + " | mean |",
        "|---" * (len(names) + 2) + "|",
    ]
    for label, side in drafters.items():
        cells = [
            f"{side['tau_by_category'][name]:.2f} ({side['speedup_by_category'][name]:.2f})"
            for name in names
        ]
        mean = side["tau_mean_of_categories"]
        lines.append(f"| `{label}` | " + " | ".join(cells) + f" | {mean:.2f} |")
    return lines


def _identical(side: Result) -> str:
    return "sampled" if side["identical"] is None else f"{side['identical']} of {side['prompts']}"


def _spread(interval: list[float] | None) -> str:
    return "" if interval is None else f"({interval[0]:.2f}-{interval[1]:.2f})"

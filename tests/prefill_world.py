"""What tests of prefill routing share: settings, prompts with images, and the same prompt for Hugging Face."""

from __future__ import annotations

from typing import Any

import torch
from tiny_towers import TOKENS, images, rows_of

N = TOKENS["clip"]
LAYOUT = [3, 4, 6]


def config(budget: float = 0.4, router: str = "random", **more: Any) -> dict[str, Any]:
    vision = {"tile": 2, "budget": budget, "router": router, **more.pop("vision", {})}
    return {"page_size": 4, "vision": vision, **more}


def inputs(layouts: list[list[int]], seed: int = 1) -> dict[str, torch.Tensor]:
    return {**rows_of(layouts, N, seed), "pixel_values": images(sum(len(own) - 1 for own in layouts))}  # fmt: skip


def masked(told: dict[str, torch.Tensor], cache: Any) -> dict[str, torch.Tensor]:
    """The same prompt for Hugging Face, unread columns masked out and positions as they were."""
    width = told["input_ids"].shape[1]
    rows = range(len(told["input_ids"]))
    unread = torch.stack([cache.unread_columns(row, 0, width) for row in rows])
    mask = told["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {**told, "attention_mask": mask * ~unread, "position_ids": positions}

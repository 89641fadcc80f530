"""Recordings with random content and consistent shapes, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oval_core.routing.recording import Recording
from oval_core.routing.view import PageHistory

_SIZES = (4, 3, 7, 5, 1, 4, 8, 4, 6, 5, 4, 4, 5)
_GROUPS = (0, -1, 0, 1)
_HEADS = 4


def toy_recording(
    seed: int = 0,
    *,
    sizes: Sequence[int] = _SIZES,
    context: int = 47,
    steps: int | None = None,
    prompt_window: int = 3,
    jump: bool = False,
) -> Recording:
    """Returns a recording of two groups.

    Args:
        seed: of the random content.
        sizes: of the pages.
        context: tokens of the prompt.
        steps: as many as there are tokens behind the prompt, or fewer.
        prompt_window: recorded queries of the prompt.
        jump: from step 5 on nearly all mass is on page 3, and none before.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    num_pages, num_steps = len(sizes), steps or int(counts.sum()) - context

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    exists = starts <= context + torch.arange(num_steps)[:, None]
    routed = torch.tensor([group for group in _GROUPS if group >= 0])
    part_mass = (3 * draw(num_steps, len(routed), _HEADS, num_pages)).exp()
    prompt_mass = draw(prompt_window, 2, num_pages) * (starts < context)
    if jump:
        part_mass[:5, ..., 3], part_mass[5:, ..., 3] = 1e-4, 1e4
        prompt_mass[..., 3] = 0
    part_mass = part_mass * exists[:, None, None]
    part_mass = part_mass / part_mass.sum(-1, keepdim=True)
    prompt_mass = prompt_mass / prompt_mass.sum(-1, keepdim=True)
    of_group = [part_mass[:, routed == group] for group in range(2)]
    sampled = torch.arange(0, num_steps, 4)
    vectors = draw(len(sampled), len(routed), _HEADS, num_pages, 6) - 0.3
    return Recording(
        kind="toy",
        name=f"toy {seed}",
        context=context,
        starts=starts,
        counts=counts,
        group_of_layer=_GROUPS,
        token_bytes=10,
        mass=torch.stack([own.mean((1, 2)) for own in of_group], 1),
        peak=torch.stack([own.amax((1, 2)) for own in of_group], 1),
        effect=draw(num_steps, 2, num_pages) * exists[:, None],
        hidden=draw(num_steps, 5),
        page_hidden=draw(num_pages, 5),
        newest_hidden=draw(num_steps, 5),
        signals={"quest": draw(num_steps + 1, 2, num_pages).log()},
        sampled=sampled,
        part_mass=part_mass[sampled],
        part_output=(part_mass[sampled][..., None] * vectors).bfloat16(),
        **_of_prompt(prompt_mass, starts < context),
    )


def _of_prompt(mass: torch.Tensor, exists: torch.Tensor) -> dict[str, Any]:
    history = PageHistory.empty(*mass.shape[1:])
    for row in mass:
        history = history.observe(row, row, exists.expand(row.shape))
    return {
        "snapkv": mass.mean(0),
        "h2o": mass.sum(0),
        "tova": mass[-1].mean(0),
        "prompt_mass": mass,
        "prompt_history": history,
    }

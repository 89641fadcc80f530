"""Judges selections of pages by a recording: attention mass that they cover, error of the output, bytes to move.

Shapes: T steps, G layer groups, P pages. A selection is bool [T, G, P], as `replay` returns it.
"""

from __future__ import annotations

import torch

from oval_core.routing.recording import Recording

HEAVY = 0.05
"""Attention mass from which on a page is heavy."""


def mass_recall(recording: Recording, selections: torch.Tensor) -> float:
    """Returns the attention mass that the selected pages hold, mean over steps and groups."""
    return _covered(recording, selections).mean().item()


def mass_recall_p10(recording: Recording, selections: torch.Tensor) -> float:
    """Returns the same for the step and group at the tenth percentile."""
    return _covered(recording, selections).quantile(0.1).item()


def mass_recall_excluding_kept(
    recording: Recording, selections: torch.Tensor, kept: torch.Tensor
) -> float:
    """Returns the share that is covered of the mass outside pages that are read in any case (kept: bool [T, P])."""
    rest = recording.mass * ~kept[:, None]
    total = rest.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((rest * selections).sum(-1) / total).mean().item()


def page_recall(recording: Recording, selections: torch.Tensor) -> float:
    """Returns the share of a selection of k pages that is among the k pages with most mass; mean as in `mass_recall`."""
    order = recording.mass.argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(
        -1, order, torch.arange(order.shape[-1]).expand(order.shape)
    )
    size = selections.sum(-1, keepdim=True)
    hits = (selections & (rank < size)).sum(-1)
    return (hits / size[..., 0].clamp(min=1)).mean().item()


def heavy_page_recall(
    recording: Recording, selections: torch.Tensor, threshold: float = HEAVY
) -> float:
    """Returns the share of heavy pages, over all steps and groups, that are selected; nan where there is none."""
    heavy = recording.mass >= threshold
    return ((heavy & selections).sum() / heavy.sum()).item()


def output_error(recording: Recording, selections: torch.Tensor) -> float:
    """Returns how far attention over the selection moves the output of a head, over the output's norm.

    Mean over the sampled steps, routed layers and heads; nan where no step was sampled.
    """
    groups = torch.tensor([group for group in recording.group_of_layer if group >= 0])
    errors = []
    for place, step in enumerate(recording.sampled.tolist()):
        parts = recording.part_output[place].float()  # [L, H, P, E]
        mass = recording.part_mass[place]  # [L, H, P]
        read = selections[step, groups][:, None].to(mass.dtype)  # [L, 1, P]
        whole = parts.sum(-2) / mass.sum(-1, keepdim=True)
        seen = (mass * read).sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        sparse = (read[..., None, :] @ parts)[..., 0, :] / seen
        errors.append((sparse - whole).norm(dim=-1) / whole.norm(dim=-1))
    return torch.stack(errors).mean().item() if errors else float("nan")


def missed_effect(recording: Recording, selections: torch.Tensor) -> float:
    """Returns the sum of the effects of the pages that were left out, mean over steps and groups.

    How far the output would move page by page: an upper bound, roughly, of the output error, where no partial outputs
    were kept.
    """
    return (recording.effect * ~selections).sum(-1).mean().item()


def miss_bytes_per_token(
    recording: Recording, selections: torch.Tensor, oracle: torch.Tensor
) -> float:
    """Returns the bytes a step of pages that the oracle reads and the selection does not, over all routed layers.

    A slow tier would load them late. The oracle is a selection under the same budget (`oracle_selections`).
    """
    return _bytes(recording, oracle & ~selections).mean().item()


def new_bytes_per_token(recording: Recording, selections: torch.Tensor) -> float:
    """Returns the bytes a step of pages that the step before did not read: what must be moved in time.

    Pages without a committed token are left out: they are written where they are read. Mean over all steps but the
    first; nan where there is but one.
    """
    new = selections[1:] & ~selections[:-1]
    return _bytes(recording, torch.cat((torch.zeros_like(selections[:1]), new)))[1:].mean().item()


def _covered(recording: Recording, selections: torch.Tensor) -> torch.Tensor:
    # [T, G]; a recording that was stored in float16 sums to 1 only nearly
    return (recording.mass * selections).sum(-1) / recording.mass.sum(-1)


def _bytes(recording: Recording, pages: torch.Tensor) -> torch.Tensor:
    # [T]
    tokens = (pages * recording.committed()[:, None]).sum(-1)  # [T, G]
    return (tokens * recording.layers_of_group).sum(-1).float() * recording.token_bytes

"""Starts a `FusionRouter` in CLIP's joint space: least squares from the decoder's inputs to CLIP's embeddings.

Shapes: S samples, T text tokens, N image tokens, P image pages, D of CLIP, H of the router, C hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from oval_core.errors import ConfigError
from oval_mm.fusion_router import FusionRouter, FusionView

__all__ = ["ClipSample", "fit_to_clip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSample:
    """One row with what CLIP makes of it.

    Attributes:
        view: as the router sees it.
        question: [D] embedding of the text.
        pages: [P, D] embeddings of the image pages.
    """

    view: FusionView
    question: torch.Tensor
    pages: torch.Tensor


@torch.no_grad()
def fit_to_clip(router: FusionRouter, samples: Sequence[ClipSample], ridge: float = 1e-2) -> None:
    """Sets both projections so that mean text and image tokens lie where CLIP puts question and page.

    CLIP's space is cut to the directions that vary most between embeddings, H of them; ridge regression does the rest.
    The router then ranks pages about as CLIP does, without CLIP. Everything beside the two projections stays as it is.

    Args:
        router: with `init: clip`.
        samples: a few hundred rows; the more, the closer.
        ridge: weight of the penalty, relative to the inputs' mean square.
    Raises:
        ConfigError: no sample, or a router that was made to begin in another way.
    """
    if router.config.init != "clip":
        raise ConfigError(
            f"init: got {router.config.init!r}. Allowed: clip. Make the router with init='clip' to fit it."
        )
    if not samples:
        raise ConfigError("samples: got none. Allowed: one at least. Pass rows with CLIP embeddings.")  # fmt: skip
    questions = F.normalize(torch.stack([s.question.float().cpu() for s in samples]), dim=-1)
    pages = F.normalize(torch.cat([s.pages.float().cpu() for s in samples]), dim=-1)
    reduce = _main_directions(torch.cat([questions, pages]), router.config.size)
    text = torch.stack([_text_mean(router, sample.view) for sample in samples])
    image = torch.cat([_page_means(sample.view) for sample in samples])
    _set(router.text_in, text, questions @ reduce, ridge)
    _set(router.image_in, image, pages @ reduce, ridge)


def _text_mean(router: FusionRouter, view: FusionView) -> torch.Tensor:
    text = view.text[-router.config.max_text :].float().cpu()
    return F.layer_norm(text, text.shape[-1:]).mean(0)


def _page_means(view: FusionView) -> torch.Tensor:
    image = view.image.float().cpu()
    image = F.layer_norm(image, image.shape[-1:])
    page, num_pages = view.image_page.cpu(), view.num_image_pages
    sums = torch.zeros(num_pages, image.shape[1]).index_add(0, page, image)
    return sums / torch.bincount(page, minlength=num_pages)[:, None]


def _main_directions(embeddings: torch.Tensor, size: int) -> torch.Tensor:
    """Returns an orthonormal map [D, H] that keeps most of dot products; zeros where D is less than H."""
    _, _, directions = torch.linalg.svd(embeddings, full_matrices=False)
    kept = directions[:size].T
    return F.pad(kept, (0, size - kept.shape[1]))


def _set(linear: torch.nn.Linear, inputs: torch.Tensor, wanted: torch.Tensor, ridge: float) -> None:
    """Sets weight and bias to the ridge solution of wanted [S, H] from inputs [S, C]."""
    centre, target = inputs.mean(0), wanted.mean(0)
    x, y = (inputs - centre).double(), (wanted - target).double()
    penalty = ridge * x.square().mean().clamp(min=1e-12) * len(x)
    if x.shape[0] < x.shape[1]:  # fewer samples than inputs: the dual is smaller
        gram = x @ x.T + penalty * torch.eye(len(x), dtype=x.dtype)
        solved = x.T @ torch.linalg.solve(gram, y)
    else:
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        solved = torch.linalg.solve(gram, x.T @ y)
    weight = solved.T.to(linear.weight)
    linear.weight.copy_(weight)
    linear.bias.copy_(target.to(linear.bias) - weight @ centre.to(linear.bias))

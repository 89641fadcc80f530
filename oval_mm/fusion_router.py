"""Scores text and image pages of a prompt together: text attends over the image, then looks for pages alike.

Shapes: T text tokens, N image tokens, P pages (text pages first), C hidden size of the decoder, H of the router.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.config import check_int
from oval_core.errors import ConfigError

__all__ = ["INITS", "FusionConfig", "FusionRouter", "FusionView"]

INITS = ("clip", "key-mean", "random")
_SHARPNESS = 10.0
"""Scale of the cosine at first: differences of CLIP's cosines are small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """Shape of a `FusionRouter`.

    Attributes:
        hidden_size: C of the decoder.
        size: H, width of the router.
        num_heads: of its cross-attention.
        init: `random`; `key-mean`: one projection that keeps dot products, so that at first it is the cosine of mean
            text and page; `clip`: fitted to CLIP's joint space by `fit_to_clip` before it is used.
        max_text: last text tokens that are read.
    """

    hidden_size: int
    size: int = 128
    num_heads: int = 4
    init: str = "random"
    max_text: int = 256

    def __post_init__(self) -> None:
        for name in ("hidden_size", "size", "num_heads", "max_text"):
            check_int(name, getattr(self, name), 1, None)
        if self.size % self.num_heads:
            raise ConfigError(
                f"num_heads: got {self.num_heads} with size {self.size}. Allowed: divisors of it. Choose one."
            )
        if self.init not in INITS:
            raise ConfigError(
                f"init: got {self.init!r}. Allowed: {', '.join(INITS)}. Choose one of them."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FusionConfig:
        """Builds a config from plain values; an unknown key raises `ConfigError`."""
        known = {field.name for field in dataclasses.fields(cls)}
        strange = sorted(set(values) - known)
        if strange:
            raise ConfigError(
                f"fusion config: got unknown keys {strange}. Allowed: {', '.join(sorted(known))}. "
                "Use a file that this version of OVAL wrote."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionView:
    """One row as the router sees it.

    Attributes:
        text: [T, C] hidden states of text tokens, or what the decoder gets for them.
        image: [N, C] projected features of all images, one after another.
        text_page: long [T] page of each text token, 0, 1, ...
        image_page: long [N] page of each image token, counted over all images.
    """

    text: torch.Tensor
    image: torch.Tensor
    text_page: torch.Tensor
    image_page: torch.Tensor

    @property
    def num_text_pages(self) -> int:
        """Text pages; their scores come first."""
        return int(self.text_page.max()) + 1 if len(self.text_page) else 0

    @property
    def num_image_pages(self) -> int:
        """Image pages."""
        return int(self.image_page.max()) + 1 if len(self.image_page) else 0


class FusionRouter(nn.Module):
    """Predicts the attention mass of text and image pages before the decoder runs.

    Text tokens attend over the image tokens (multi-head, residual, silent at first), are pooled into one query, and each
    token of a page is scored by its cosine with the query; a page's score is the log of its summed exp: a log mass, as
    softmax attention has it.
    """

    name = "fusion"

    def __init__(self, config: FusionConfig) -> None:
        super().__init__()
        self.config = config
        size, hidden = config.size, config.hidden_size
        self.text_norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.image_norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.text_in = nn.Linear(hidden, size)
        self.image_in = nn.Linear(hidden, size)
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.out = nn.Linear(size, size)
        self.pool = nn.Linear(size, 1)
        last = nn.Linear(size, size)
        self.refine = nn.Sequential(nn.Linear(size, size), nn.GELU(), last)
        self.kind_bias = nn.Parameter(torch.zeros(2))
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(_SHARPNESS)))
        for silent in (self.out, self.pool, last):
            nn.init.zeros_(silent.weight)
            nn.init.zeros_(silent.bias)
        if config.init == "key-mean":
            self._share_projection()

    def forward(self, view: FusionView) -> torch.Tensor:
        """Returns scores [P]: log of the predicted mass of each page, up to a constant; text pages first."""
        scores, page = self._token_scores(view)
        num_pages = view.num_text_pages + view.num_image_pages
        return _log_sums(scores, page, num_pages)

    def density(self, view: FusionView) -> torch.Tensor:
        """Returns scores [P] a token: log of the predicted mean mass of a page's tokens."""
        scores, page = self._token_scores(view)
        num_pages = view.num_text_pages + view.num_image_pages
        counts = torch.bincount(page, minlength=num_pages).clamp(min=1)
        return _log_sums(scores, page, num_pages) - counts.log()

    def _token_scores(self, view: FusionView) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the score of each token [T + N] and its page."""
        weight = self.text_in.weight
        text = self.text_in(self.text_norm(view.text.to(weight)))
        image = self.image_in(self.image_norm(view.image.to(weight)))
        asked = self._fused(text[-self.config.max_text :], image)
        query = F.normalize((self.pool(asked).softmax(0) * asked).sum(0), dim=0)
        tokens = torch.cat([text, image])
        tokens = F.normalize(tokens + self.refine(tokens), dim=-1)
        bias = torch.cat([self.kind_bias[:1].expand(len(text)), self.kind_bias[1:].expand(len(image))])  # fmt: skip
        scores = self.log_sharpness.exp() * (tokens @ query) + bias
        page = torch.cat([view.text_page, view.num_text_pages + view.image_page])
        return scores, page.to(scores.device)

    def _fused(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Returns text [T, H] after it attended over the image."""
        if not len(image):
            return text
        heads = self.config.num_heads

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(len(states), heads, -1).transpose(0, 1)[None]

        seen = F.scaled_dot_product_attention(
            split(self.query(text)), split(self.key(image)), split(self.value(image))
        )
        fused: torch.Tensor = text + self.out(seen[0].transpose(0, 1).reshape(len(text), -1))
        return fused

    def _share_projection(self) -> None:
        with torch.no_grad():
            nn.init.orthogonal_(self.text_in.weight)
            self.image_in.weight.copy_(self.text_in.weight)
            self.text_in.bias.zero_()
            self.image_in.bias.zero_()


def _log_sums(scores: torch.Tensor, page: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Returns the log-sum-exp of scores by page, [num_pages]."""
    top = scores.detach().amax()
    sums = torch.zeros(num_pages, dtype=scores.dtype, device=scores.device)
    sums = sums.index_add(0, page, (scores - top).exp())
    logs: torch.Tensor = sums.clamp(min=torch.finfo(scores.dtype).tiny).log() + top
    return logs

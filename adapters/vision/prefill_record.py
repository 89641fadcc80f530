"""Records where a decoder looks when it has read a prompt with images: rows to train a `FusionRouter` on.

The masses are those of full attention, of the question's last tokens only: no map of all tokens on all is made.
Shapes: L tokens of a row, T text tokens, N image tokens, P pages (text pages first), H heads, W watched queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.vision.placement import ImagePart
from oval_adapters.vision.prefill_choice import Prompt, question_columns
from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.kv_pool import LayerStore
from oval_core.pages import SequencePages
from oval_core.policy import FullPolicy
from oval_core.routing.mass_watch import masked_scores
from oval_core.values import LayerSpec, PageSelection, RowPlan
from oval_mm.fusion_clip import ClipSample
from oval_mm.fusion_training import FusionRecord
from oval_mm.page_choice import ImagePages, fusion_view
from oval_mm.tiles import tile_pages

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.vision.prefill_clip import PromptVectors
    from oval_adapters.vision.unread import PlacedView

__all__ = ["LastQueries", "record_prefill"]


class LastQueries(FullPolicy):
    """Reads everything, and adds up what the last queries of a forward give to each token.

    Attributes:
        mass: by row, [L] share of attention by token, mean over layers, heads and queries.

    Args:
        num_queries: last queries of each row that are watched.
        layers: decoder layers that are; None for all.
    """

    def __init__(self, num_queries: int, layers: Sequence[int] | None = None) -> None:
        self._num_queries, self._layers = num_queries, layers
        self._sums: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}

    @property
    def mass(self) -> dict[int, torch.Tensor]:
        """By row; see the class."""
        return {row: total / self._counts[row] for row, total in self._sums.items()}

    def select(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> PageSelection:
        """Returns all pages of every row, watched."""
        return PageSelection(is_watched=True)

    def watches(self, layer_idx: int) -> bool:
        """Whether a layer counts."""
        return self._layers is None or layer_idx in self._layers

    def saw(
        self,
        layer_idx: int,
        row: int,
        query: torch.Tensor,
        store: LayerStore,
        plan: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None,
    ) -> None:
        """Adds one layer of one row; see `SelectionPolicy`."""
        last = query[:, -self._num_queries :]
        scores = masked_scores(last, store, plan, spec, bias)
        share = scores.softmax(-1).mean((0, 1)).cpu()
        tokens = plan.key_tokens
        total = torch.zeros(plan.num_tokens)
        total[slice(None) if tokens is None else tokens.cpu()] = share
        before = self._sums.get(row)
        self._sums[row] = total if before is None else before + total
        self._counts[row] = self._counts.get(row, 0) + 1


@torch.no_grad()
def record_prefill(
    oval: Attachment,
    inputs: Mapping[str, Any],
    *,
    num_queries: int = 8,
    layers: Sequence[int] | None = None,
    vectors: PromptVectors | None = None,
) -> list[tuple[FusionRecord, ClipSample | None]]:
    """Returns what each row with an image gave: a record, and what CLIP says of it if `vectors` are given.

    Args:
        oval: a LLaVA, attached with every image token read: without `vision.budget`, policy `full`, no `tiers`.
        inputs: of the model, as a processor makes them, `input_ids` among them.
        num_queries: last tokens of the question whose attention counts.
        layers: decoder layers that count; None for all.
        vectors: makes CLIP embeddings, for `fit_to_clip`.
    Raises:
        ConfigError: settings under which the decoder does not read everything.
    """
    check_int("num_queries", num_queries, 1, None)
    config = oval.config
    if oval.image_routing is not None or config.policy != "full" or config.tiers is not None:
        raise ConfigError(
            "record_prefill: got a model whose prompts are routed, or kept in tiers. Allowed: policy full without "
            "vision.budget and tiers. Attach it so while recording."
        )
    if vectors is not None and not vectors.shared and oval._vision is not None:
        oval._vision.keeps_pixels()  # a CLIP that is not the model's own tower looks at them
    watch = LastQueries(num_queries, layers)
    with contextlib.closing(oval.new_cache()) as cache:
        cache.paged.read_by(watch, None)
        oval.model(**inputs, cache=cache, logits_to_keep=1)
        return _rows(oval, cache, watch, inputs, vectors)


def _rows(
    oval: Attachment,
    cache: OvalCache,
    watch: LastQueries,
    inputs: Mapping[str, Any],
    vectors: PromptVectors | None,
) -> list[tuple[FusionRecord, ClipSample | None]]:
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.bool().cpu()
    embeds = oval.model.get_input_embeddings()(ids)
    views = [cache.image_views.row(row) for row in range(len(ids))]
    parts = [tuple(ImagePart(v.column, v.length, 0, v.view) for v in own) for own in views]
    prompt = Prompt(embeds=embeds, real=real, images=parts, ids=ids)
    tile = cache.paged.image_tile
    return [
        _row(prompt, row, own, watch.mass[row], tile, vectors)
        for row, own in enumerate(views)
        if own
    ]


def _row(
    prompt: Prompt,
    row: int,
    views: Sequence[PlacedView],
    mass: torch.Tensor,
    tile: int,
    vectors: PromptVectors | None,
) -> tuple[FusionRecord, ClipSample | None]:
    by_column = torch.zeros(prompt.real.shape[1])
    by_column[prompt.real[row]] = mass
    text = question_columns(prompt, row)
    clip = [None if vectors is None else vectors.pages(view.view, tile) for view in views]
    images = [
        ImagePages(
            features=view.view.features.float().cpu(),
            pages=tile_pages(view.view.grid, tile),
            shape=(view.view.grid.rows, view.view.grid.width),
            clip=own,
        )
        for view, own in zip(views, clip, strict=True)
    ]
    asked = prompt.embeds[row, text.to(prompt.embeds.device)].float().cpu()
    view = fusion_view(asked, images)
    on_images = torch.cat([by_column[own.column : own.column + own.length] for own in views])
    page = torch.cat([view.text_page, view.num_text_pages + view.image_page])
    total = torch.zeros(view.num_text_pages + view.num_image_pages)
    total.index_add_(0, page, torch.cat([by_column[text], on_images]))
    sample = None
    if vectors is not None:
        assert prompt.ids is not None, "inputs have ids"
        pages = torch.cat([own for own in clip if own is not None]).cpu()
        question = vectors.question(prompt.ids[row, text].tolist()).cpu()
        sample = ClipSample(view=view, question=question, pages=pages)
    shapes = tuple(image.shape for image in images)
    return FusionRecord(view=view, mass=total, shapes=shapes), sample

"""`OvalCache`: what Hugging Face sees as a `Cache`, over a `PagedCache`. Thin: it translates, it does not store.

transformers' own `PagedAttentionCache` says *block* for our page and *page* for our slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from oval_adapters.cache_checks import check_length, check_rows
from oval_adapters.columns import ColumnMap
from oval_adapters.held import Held, Tree
from oval_adapters.hf_attention import VIEW_KEY, LayerView
from oval_adapters.hf_cache_api import HfCacheApi
from oval_adapters.hf_layer import OvalLayer
from oval_adapters.interrupts import hold_interrupts
from oval_adapters.ready_mask import additive
from oval_adapters.vision.gathering import Gathering
from oval_adapters.vision.row_images import ImageLog, RowImage
from oval_adapters.vision.unread import UnreadImages
from oval_core.errors import CacheMismatchError, UnsupportedModelError
from oval_core.metrics import StepMetrics
from oval_core.paged_cache import PagedCache
from oval_core.policy import SelectionPolicy
from oval_core.routing.routed import RoutedPolicy
from oval_core.values import RowRequest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from oval_adapters.vision.filling import Filling
    from oval_adapters.vision.placement import Parts

__all__ = ["OvalCache"]


class OvalCache(HfCacheApi):
    """Paged cache of one batch, for the model whose attachment made it (`oval.new_cache()`).

    Any Hugging Face code may hold it: `generate`, beam search, assisted decoding, a later turn. Only forwards
    of the attached model may fill it; every other use raises `CacheMismatchError`.
    """

    def __init__(
        self,
        paged: PagedCache,
        text_config: PretrainedConfig,
        windows: Sequence[int | None],
        owner: object,
        reserve: int = 0,
    ) -> None:
        super().__init__(layers=[OvalLayer(self, layer_idx) for layer_idx in range(len(windows))])
        self.paged = paged
        self.owner = owner
        self.reserve = reserve
        self._config = text_config
        self._windows = windows
        self._columns = ColumnMap()
        self._images = ImageLog()
        self.image_views = UnreadImages()
        """Images of the prompts, with their columns, read or not."""
        self._held: Held | None = None
        self._is_whole = True
        self.keeps_hidden = False
        """Whether `last_hidden` is kept; set it before a forward."""
        self.last_hidden: torch.Tensor | None = None
        """The decoder's last hidden states [B, T, C] of the last forward, after its final norm."""
        self._views = [LayerView(paged, i, window) for i, window in enumerate(windows)]

    @property
    def is_held(self) -> bool:
        """Whether `hold` was called, and neither `accept` nor `abort` since."""
        return self._held is not None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, padding not counted; empty before the first forward."""
        return [seq.length for seq in self.paged.table.sequences]

    @property
    def images(self) -> tuple[tuple[RowImage, ...], ...]:
        """What images each row holds, in the order of its text."""
        self._settle("images")
        return self._images.images(self.paged.table.sequences)

    @property
    def last_step(self) -> StepMetrics | None:
        """What the last forward moved between tiers, hits and misses by layer; None without `tiers`."""
        return self.paged.last_step

    def begin(
        self,
        owner: object,
        attention_mask: torch.Tensor | None,
        batch_size: int,
        num_queries: int,
        device: torch.device,
        is_prompt: bool = False,
        images: Sequence[Parts] = (),
        unread: torch.Tensor | None = None,
    ) -> Gathering | None:
        """Plans one forward; called by the attachment before the decoder runs.

        Args:
            owner: the attachment whose model is about to run.
            attention_mask: [B, L] padding mask, [B, 1, T, L] ready mask, or None.
            batch_size: B.
            num_queries: T, padding included.
            device: device of the decoder.
            is_prompt: whether it is a piece of a prompt or of a long turn, which policies that select read whole.
            images: by row, which columns are images; nothing where all are text.
            unread: bool [B, T] columns that the decoder is not to get, though they count; None for none.
        Returns:
            Which columns the decoder is to get; None for all.
        Raises:
            CacheMismatchError: another model, another batch size, a mask of the wrong shape.
            PromptTooLongError: the text would outgrow the model's positions.
        """
        requests, bias = self.check(owner, attention_mask, batch_size, num_queries, unread)
        self._is_whole = False
        if images:
            lengths = self.lengths or [0] * batch_size
            requests = self._images.begin(requests, images, lengths, self.paged.image_tile)
        gathering = None
        if unread is not None:
            gathering = Gathering.of(self._columns.coming(batch_size, num_queries))
            requests, num_queries = gathering.narrow(requests), gathering.width
        self._begin(requests, num_queries, device, bias, is_prompt)
        return gathering

    def begin_filling(self, owner: object, filling: Filling) -> None:
        """Plans a forward that reads image tokens which an earlier one left unread; see `Filling`."""
        self._settle("forward")
        rows, width = filling.inputs.shape[:2]
        check_rows(owner is self.owner, self.paged.batch_size, rows)
        self._is_whole = False
        requests = self._columns.fill(filling.columns, width)
        requests = filling.told(requests, self._images, self.lengths, self.paged.image_tile)
        self._begin(requests, width, filling.inputs.device, None, is_prompt=True)

    def _begin(
        self,
        requests: list[RowRequest],
        num_queries: int,
        device: torch.device,
        bias: torch.Tensor | None,
        is_prompt: bool,
    ) -> None:
        policy = self.paged.policy
        if is_prompt and isinstance(policy, RoutedPolicy):
            policy.read_whole()
        self.paged.begin(requests, num_queries, device, self.reserve, bias)

    def check(
        self,
        owner: object,
        attention_mask: torch.Tensor | None,
        batch_size: int,
        num_queries: int,
        unread: torch.Tensor | None = None,
    ) -> tuple[list[RowRequest], torch.Tensor | None]:
        """Checks a forward before anything is done for it; returns what its rows bring and its additive mask."""
        self._settle("forward")
        check_rows(owner is self.owner, self.paged.batch_size, batch_size)
        if self._held is not None:
            trees = self._held.check_forward(attention_mask, batch_size, num_queries)
            return self._columns.hold(trees, num_queries, with_columns=any(self._windows)), None
        bias = None
        if attention_mask is not None and attention_mask.ndim == 4:
            want = (batch_size, self._config.num_attention_heads, num_queries)
            bias = additive(attention_mask, want, self._columns)
            attention_mask = None
        with_columns = any(self._windows)
        requests = self._columns.request(
            attention_mask, batch_size, num_queries, with_columns=with_columns, unread=unread
        )
        # decoding past the last position is Hugging Face's own business: it warns
        if num_queries > 1:
            limit = getattr(self._config, "max_position_embeddings", None)
            check_length(self.lengths, [request.num_new for request in requests], limit)
        return requests, bias

    def commit(self, hidden_states: torch.Tensor) -> None:
        """Makes the tokens of the running forward count, if it is not held; called by the attachment after the decoder ran.

        Args:
            hidden_states: last hidden states [B, T, C].
        """
        if self.keeps_hidden:
            self.last_hidden = hidden_states
        hidden = hidden_states if self.paged.tracks_hidden else None
        if self._held is not None:
            self._held.ran(hidden)
            return
        num_queries = self.paged.plan.num_queries
        self.paged.commit(hidden)
        self._columns.commit(num_queries)
        self.paged.counters.image_pages += self._images.commit()
        self._is_whole = True

    def hold(self, trees: Sequence[Tree]) -> None:
        """Lets the next forward not count until `accept`; `abort` drops it.

        The forward must pass ids [B, T], positions [B, T] and no mask: the new tokens of each row come first, the rest of
        T is padding. Each sees what its row has cached, and among the new ones what its tree says.

        Args:
            trees: by row, a token tree (bool [N, N], which new tokens each one sees, itself among them), or the number of
                tokens of a chain; 0 where a row brings nothing. One row at least brings a token.
        Raises:
            CacheMismatchError: another number of rows, no tree, or a forward is held already.
        """
        self._settle("hold")
        rows = self.paged.batch_size or len(trees)
        self._held = Held(trees, rows, self.paged.max_new_tokens(rows))

    def accept(self, places: Sequence[Sequence[int]]) -> None:
        """Makes tokens of the held forward count; the others are dropped and leave no trace.

        Hugging Face's columns of a row's new tokens follow its last stored column; shorter rows get padding on the right.

        Args:
            places: by row, places of the tokens that count among its new ones, ascending; empty for none.
        Raises:
            CacheMismatchError: no forward is held, or places that it did not bring.
        """
        held = self._held
        if held is None or not held.has_run:
            raise CacheMismatchError(
                "accept: got it without a held forward. Allowed: after `hold` and one forward. Call them first."
            )
        kept = held.check_places(places)
        with hold_interrupts():
            self._held = None  # an error below takes the forward back before the next use
            self.paged.commit(held.hidden, kept)
            self._columns.accept([len(own) for own in kept])
            self._is_whole = True

    def abort(self) -> None:
        """Takes back the running or held forward: the cache is as it was before; without one nothing happens."""
        self._held = None
        if not self._is_whole:
            self._mend()

    @contextlib.contextmanager
    def drafting(self, policy: SelectionPolicy) -> Iterator[None]:
        """Lets forwards in the `with` block read by another policy; their tokens are dropped at its end.

        See `oval_core.paged_cache.PagedCache.drafting`.
        """
        self._settle("drafting")
        columns, context = self._columns, self.paged.drafting(policy)
        with hold_interrupts():
            context.__enter__()
            self._columns = columns.copy()
        try:
            yield
        finally:
            with hold_interrupts():
                self._held, self._is_whole, self._columns = None, False, columns
                context.__exit__(None, None, None)
                self._is_whole = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys [B, K, T, D] and values [B, K, T, E]; returns them as they are.

        The attention function reads the pool through the `LayerView` that is put into the attention
        keyword arguments here: transformers hands the same dictionary on to it.
        """
        self.paged.write(layer_idx, key_states, value_states)
        attention_kwargs = kwargs.get("kwargs")
        if attention_kwargs is None:
            raise UnsupportedModelError(
                f"layer {layer_idx} does not hand its attention arguments to the cache. Allowed: models that "
                "call cache.update(..., kwargs=kwargs). Run this model without OVAL."
            )
        attention_kwargs[VIEW_KEY] = self._views[layer_idx]
        return key_states, value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns of every row.

        Args:
            tokens_to_remove: minus the number of columns, or 0, as in transformers 5.24.
        """
        self._settle("crop")
        columns = self._columns.length
        if not -columns <= tokens_to_remove <= 0:
            raise CacheMismatchError(
                f"crop: got {tokens_to_remove}. Allowed: minus the number of tokens to remove, {-columns}..0. "
                "Pass a negative number."
            )
        if tokens_to_remove < 0:
            with hold_interrupts():
                self._is_whole = False  # pages that cannot follow now do before the next use
                kept = self._columns.crop(columns + tokens_to_remove, self.paged.batch_size)
                self.paged.truncate(kept)
                self._images.crop(kept)
                self.image_views.crop(self._columns.length)
                self._is_whole = True

    def reset(self) -> None:
        """Drops every token and row; the memory stays for the next text."""
        self._held = self.last_hidden = None
        with hold_interrupts():
            self.paged.reset()
            self._columns.reset()
            self._images.reset()
            self.image_views.reset()
            self._is_whole = True

    def close(self) -> None:
        """Ends the worker and the file of `tiers`; the cache cannot be used any more. Twice is harmless.

        `generate` does it for caches that it made itself; a cache that nobody holds any more is closed as well.
        """
        self.paged.close()

    def to_dynamic_cache(self) -> DynamicCache:
        """Returns a plain `DynamicCache` with the same tokens, to go on without OVAL. Padding holds zeros."""
        cache = DynamicCache(config=self._config)
        for layer_idx in range(self.num_layers):
            keys, values = self.layers[layer_idx].keys, self.layers[layer_idx].values
            if keys is not None and values is not None:
                cache.update(keys, values, layer_idx)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> OvalCache:
        """Copies tokens and pages (prefix reuse by `copy.deepcopy`); the copy belongs to the same model."""
        return self.copy()

    def copy(self, policy: SelectionPolicy | None = None) -> OvalCache:
        """Returns an independent copy with the same tokens and pages, for the same model.

        Args:
            policy: what the copy selects by, if not as this cache does; it must know the text already.
        """
        self._settle("copy")
        paged = self.paged.clone(policy)
        twin = OvalCache(paged, self._config, self._windows, self.owner, self.reserve)
        twin._columns, twin._images = self._columns.copy(), self._images.copy()
        twin.image_views = self.image_views.copy()
        twin.keeps_hidden, twin.last_hidden = self.keeps_hidden, self.last_hidden
        return twin

    def grid(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns copies of keys [B, K, L, D] and values [B, K, L, E] in columns, or None when empty."""
        self._settle("grid")
        if not self.paged.batch_size:
            return None
        rows = [self.paged.gather(layer_idx, row) for row in range(self.paged.batch_size)]
        return self._columns.spread([k for k, _ in rows]), self._columns.spread(
            [v for _, v in rows]
        )

    def _select(self, rows: list[int]) -> None:
        self._settle("reorder")
        with hold_interrupts():
            self.paged.reorder(rows)
            self._columns.select(rows)
            self._images.select(rows)
            self.image_views.select(rows)

    def _settle(self, what: str) -> None:
        """Raises where a held forward waits; else takes back one that was cut off."""
        if self._held is not None:
            self._held.check_may(what)
        self._mend()

    def _mend(self) -> None:
        """Takes back a forward that was cut off between pages and columns: it never counted."""
        if self._is_whole:
            return
        self.paged.abort()
        self._columns.abort()
        self._images.abort()
        rows = self.paged.batch_size
        if not self._columns.length:
            self.paged.reset()
            self._images.reset()
            self.image_views.reset()
        elif rows:
            kept = self._columns.crop(self._columns.length, rows)
            self.paged.truncate(kept)
            self._images.crop(kept)
        self._is_whole = True

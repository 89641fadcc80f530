"""Runs a decoder's forwards on OVAL's attention: plan, run, commit. Any error takes a forward back.

Shapes: B rows, T columns of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.attention_switch import AttentionSwitch
from oval_adapters.decoder_calls import positions_of
from oval_adapters.interrupts import hold_interrupts
from oval_adapters.pieces import merge_outputs, split_call
from oval_adapters.vision.placement import Parts, cut_parts

if TYPE_CHECKING:
    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.vision.filling import Filling

__all__ = ["DecoderRun"]


class DecoderRun:
    """Forwards of one decoder.

    Args:
        owner: the attachment whose caches it fills.
        switch: sets the decoder's attention.
        original: the decoder's own forward.
    """

    def __init__(
        self, owner: object, switch: AttentionSwitch, original: Callable[..., Any]
    ) -> None:
        self._owner, self._switch, self._original = owner, switch, original

    def whole(
        self,
        cache: OvalCache,
        kwargs: dict[str, Any],
        states: torch.Tensor,
        is_prompt: bool,
        images: Sequence[Parts],
        unread: torch.Tensor | None,
    ) -> Any:
        """One forward.

        Args:
            cache: to read and fill.
            kwargs: the decoder's arguments by name.
            states: ids [B, T] or embeddings [B, T, C] among them.
            is_prompt: see `OvalCache.begin`.
            images: by row, which columns are images.
            unread: bool [B, T] columns that the decoder is not to get; None for none.
        """
        mask, (rows, num_queries) = kwargs.get("attention_mask"), states.shape[:2]
        cached = cache.get_seq_length()
        with hold_interrupts():
            gathering = cache.begin(
                self._owner, mask, rows, num_queries, states.device, is_prompt, images, unread
            )
        if gathering is None:
            return self._run(cache, kwargs, states)

        def gathered() -> dict[str, Any]:
            return gathering.inputs(kwargs, positions_of(kwargs, states, cached))

        output = self._run(cache, kwargs, states, gathered)
        output = gathering.spread(output, num_queries)
        if cache.keeps_hidden:
            cache.last_hidden = output[0]
        return output

    def in_pieces(
        self,
        cache: OvalCache,
        kwargs: dict[str, Any],
        states: torch.Tensor,
        end_of: Callable[[int], int],
        is_prompt: bool,
        images: Sequence[Parts],
        unread: torch.Tensor | None,
        *,
        wants_tuple: bool,
    ) -> Any:
        """One forward as several, because fast memory takes only so many new tokens; any error takes all back."""
        before, (rows, num_queries) = cache.get_seq_length(), states.shape[:2]
        cache.check(self._owner, kwargs.get("attention_mask"), rows, num_queries)
        outputs = []
        try:
            for start, end, piece in split_call(kwargs, num_queries, end_of, before):
                own_states = piece.get("inputs_embeds")
                own_states = piece["input_ids"] if own_states is None else own_states
                own = [cut_parts(row, start, end) for row in images]
                left = None if unread is None else unread[:, start:end]
                outputs.append(self.whole(cache, piece, own_states, is_prompt, own, left))
        except BaseException:
            if before:
                cache.crop(before - cache.get_seq_length())
            else:
                cache.reset()
            raise
        merged = merge_outputs(outputs, wants_tuple)
        if cache.keeps_hidden:
            cache.last_hidden = merged[0]
        return merged

    def fill(self, cache: OvalCache, filling: Filling) -> None:
        """Reads image tokens that earlier prompts left unread; what the last forward gave stays."""
        last = cache.last_hidden
        with hold_interrupts():
            cache.begin_filling(self._owner, filling)
        kwargs = {"inputs_embeds": filling.inputs, "position_ids": filling.positions}
        self._run(cache, {**kwargs, "cache": cache, "use_cache": True}, filling.inputs)
        cache.last_hidden = last

    def _run(
        self,
        cache: OvalCache,
        kwargs: dict[str, Any],
        states: torch.Tensor,
        gathered: Callable[[], dict[str, Any]] | None = None,
    ) -> Any:
        """Runs the forward that has begun.

        Args:
            cache: to commit to.
            kwargs: the decoder's arguments.
            states: any tensor of the decoder's dtype and device.
            gathered: makes arguments in their place.
        """
        try:
            told = kwargs if gathered is None else gathered()
            told["attention_mask"] = states.new_empty(
                1, 1, 0, 0
            )  # 4-D: transformers builds no mask
            with self._switch.oval():
                output = self._original(**told)
        except BaseException:
            with hold_interrupts():
                cache.abort()
            raise
        with hold_interrupts():
            cache.commit(output[0])
        return output

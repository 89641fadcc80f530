"""Owns the K and V of every layer: one store a layer, written in place, never concatenated.

Shapes: B rows, T queries, K KV heads, S slots, D head dim of keys, E head dim of values, N new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from oval_core.errors import CacheMismatchError
from oval_core.page_layout import Relayout
from oval_core.page_table import SlotCopy
from oval_core.values import StepPlan


class LayerStore:
    """K [K, S, D] and V [K, S, E] of one layer. Keys are as they are read: after RoPE."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


class KVPool:
    """Stores of all layers over the same slots.

    Memory is set aside once for the length that is asked for. When that is not enough, layers move to
    larger stores one after the other, so at any time at most one layer exists twice.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[LayerStore | None] = [None] * num_layers
        self.hidden: torch.Tensor | None = None
        self.num_slots = 0

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all stores, free slots included."""
        tensors = [t for store in self._stores() for t in (store.keys, store.values)]
        if self.hidden is not None:
            tensors.append(self.hidden)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers written so far."""
        return self.bytes_allocated // self.num_slots if self.num_slots else 0

    def store(self, layer_idx: int) -> LayerStore:
        """Returns the store of a layer that has been written."""
        store = self.layers[layer_idx]
        assert store is not None, "layer was never written"
        return store

    def check(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises `CacheMismatchError` unless keys and values fit what the layer already holds."""
        store = self.layers[layer_idx]
        if store is None:
            return
        for what, new, old in (("keys", keys, store.keys), ("values", values, store.values)):
            got = (new.shape[1], new.shape[3], new.dtype, new.device)
            want = (old.shape[0], old.shape[2], old.dtype, old.device)
            if got != want:
                raise CacheMismatchError(
                    f"{what} of layer {layer_idx} do not fit this cache: got (KV heads, head dim, dtype, "
                    f"device) = {_show(got)}. Allowed: {_show(want)}. Use a new cache for this model, or "
                    "move the model back to the dtype and device that the cache was filled with."
                )

    def write(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, plan: StepPlan
    ) -> None:
        """Writes keys [B, K, T, D] and values [B, K, T, E] of the new tokens into their slots."""
        if self.layers[layer_idx] is None:
            self.layers[layer_idx] = LayerStore(self._empty(keys), self._empty(values))
        self.check(layer_idx, keys, values)
        store = self.store(layer_idx)
        for target, new in ((store.keys, keys.detach()), (store.values, values.detach())):
            if plan.write_run is not None:
                target[:, plan.write_run] = new[0]
                continue
            assert plan.slot_mapping is not None
            flat = new.transpose(0, 1).flatten(1, 2)  # [K, B * T, D]
            if plan.source is not None:
                flat = flat.index_select(1, plan.source.to(flat.device))
            target.index_copy_(1, plan.slot_mapping.to(target.device), flat)

    def write_hidden(self, states: torch.Tensor, plan: StepPlan) -> None:
        """Keeps the last hidden states [B, T, C] of the new tokens, by slot."""
        if self.hidden is None:
            self.hidden = _plain_empty(states, (self.num_slots, states.shape[-1]))
        states = states.detach()
        if plan.write_run is not None:
            self.hidden[plan.write_run] = states[0]
            return
        assert plan.slot_mapping is not None
        flat = states.flatten(0, 1)
        if plan.source is not None:
            flat = flat[plan.source.to(flat.device)]
        self.hidden.index_copy_(0, plan.slot_mapping.to(flat.device), flat)

    def read(self, layer_idx: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K [K, n, D] and V [K, n, E] at these slots."""
        store = self.store(layer_idx)
        index = torch.tensor(slots, dtype=torch.long, device=store.keys.device)
        return store.keys.index_select(1, index), store.values.index_select(1, index)

    def put(self, layer_idx: int, slots: Sequence[int], store: LayerStore) -> None:
        """Writes K [K, n, D] and V [K, n, E] to these slots of a layer that has been written."""
        own = self.store(layer_idx)
        index = torch.tensor(slots, dtype=torch.long, device=own.keys.device)
        own.keys.index_copy_(1, index, store.keys.to(own.keys.device))
        own.values.index_copy_(1, index, store.values.to(own.values.device))

    def apply(self, relayout: Relayout) -> None:
        """Moves everything to a pool of `relayout.num_slots`, layer by layer."""
        self.num_slots = relayout.num_slots
        for store in self._stores():
            store.keys = _moved(store.keys, 1, relayout)
            store.values = _moved(store.values, 1, relayout)
        if self.hidden is not None:
            self.hidden = _moved(self.hidden, 0, relayout)

    def copy_slots(self, copies: SlotCopy) -> None:
        """Copies the K/V of forked pages."""
        if not copies.src:
            return
        for store in self._stores():
            src = torch.tensor(copies.src, device=store.keys.device)
            dst = torch.tensor(copies.dst, device=store.keys.device)
            store.keys.index_copy_(1, dst, store.keys.index_select(1, src))
            store.values.index_copy_(1, dst, store.values.index_select(1, src))
        if self.hidden is not None:
            src = torch.tensor(copies.src, device=self.hidden.device)
            dst = torch.tensor(copies.dst, device=self.hidden.device)
            self.hidden.index_copy_(0, dst, self.hidden.index_select(0, src))

    def clear(self) -> None:
        """Gives all memory back; the next write starts anew."""
        self.layers = [None] * len(self.layers)
        self.hidden = None
        self.num_slots = 0

    def clone(self) -> KVPool:
        """Returns an independent copy."""
        return copy.deepcopy(self)

    def _stores(self) -> list[LayerStore]:
        return [store for store in self.layers if store is not None]

    def _empty(self, new: torch.Tensor) -> torch.Tensor:
        return _plain_empty(new, (new.shape[1], self.num_slots, new.shape[3]))


def _plain_empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    # A store made under inference_mode could never be written outside of it (a later turn, say).
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _moved(tensor: torch.Tensor, dim: int, relayout: Relayout) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = relayout.num_slots
    moved = _plain_empty(tensor, shape)
    for move in relayout.moves:
        moved.narrow(dim, move.dst, move.size).copy_(tensor.narrow(dim, move.src, move.size))
    return moved


def _show(facts: tuple[int, int, torch.dtype, torch.device]) -> str:
    heads, dim, dtype, device = facts
    return f"({heads}, {dim}, {str(dtype).removeprefix('torch.')}, {device})"

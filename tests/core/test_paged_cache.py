"""The paged cache against dense K and V: every row, layer and bit, through growth, aborts, forks and cuts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from core.dense_twin import CPU, DenseTwin

from oval_core import kv_pool
from oval_core.errors import CacheMismatchError
from oval_core.values import LayerSpec, RowRequest


def test_ragged_rows_over_many_forwards_equal_dense_attention() -> None:
    twin = DenseTwin(page_size=4)
    for counts in ([7, 3, 5], [1, 1, 1], [1, 0, 1], [6, 9, 2], [0, 0, 3], [1, 1, 1], [40, 1, 33]):
        twin.forward(counts)
        twin.check()
    assert twin.lengths == [56, 15, 46]


@pytest.mark.parametrize("page_size", [1, 3, 16, 32])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "torch"])
def test_one_row_prefill_chunk_and_decode(page_size: int, backend: str) -> None:
    twin = DenseTwin(page_size=page_size, backend=backend)
    for count in (50, 1, 1, 16, 1, 130, 1):
        twin.forward([count])
    twin.check()


def test_equal_rows_are_read_as_one_strided_tensor() -> None:
    twin = DenseTwin(page_size=16)
    twin.forward([20, 20, 20], reserve=64)
    for _ in range(20):
        twin.forward([1, 1, 1])
    twin.begin([1, 1, 1])
    assert twin.cache.plan.stride == (0, 64)
    twin.cache.abort()
    twin.check()


@pytest.mark.parametrize("counts", [[5, 5], [5, 3]])
def test_windows_and_hidden_keys(counts: list[int]) -> None:
    twin = DenseTwin(has_windows=True, page_size=4)
    twin.forward([20, 17], window=7)
    for step in (counts, [1, 1], [1, 0]):
        for window in (None, 3, 100):
            masks = [None, torch.rand(twin.lengths[1]) < 0.4]
            twin.forward(step, window=window, hidden_keys=masks)
    twin.check()


def test_one_row_writes_into_scattered_free_pages() -> None:
    twin = DenseTwin(page_size=4)
    for _ in range(6):
        twin.forward([4, 4, 4])  # grows, so that rows lie between each other
    twin.reorder([1])
    slots = twin.cache.table.num_slots
    twin.forward([slots - 24])  # all that is free, on both sides of the row
    assert twin.cache.table.num_slots == slots
    assert twin.cache.table.sequences[0].token_slots() != sorted(
        twin.cache.table.sequences[0].token_slots()
    )
    twin.check()


def test_padding_in_the_middle_of_the_queries() -> None:
    twin = DenseTwin(page_size=4)
    places = [torch.tensor([0, 2, 3]), torch.tensor([1]), torch.tensor([0, 1, 2, 3, 4])]
    for _ in range(3):
        twin.forward([3, 1, 5], num_queries=5, places=places)
    twin.check()


@pytest.mark.parametrize("reserve", [0, 12])
def test_growth_keeps_every_bit(reserve: int) -> None:
    twin = DenseTwin(page_size=4, track_hidden=True)
    for _ in range(9):
        twin.forward([7, 2], reserve=reserve)
        twin.check()
    assert twin.cache.counters.pool_growths > 1
    assert torch.equal(twin.cache.pool.hidden[twin.cache.table.sequences[0].token_slots()],
                       twin.hidden[0])  # fmt: skip


@pytest.mark.parametrize("stage", ["begun", "half written", "written"])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_abort_restores_everything(stage: str, count: int) -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([10, 6], reserve=32)
    before = [copy.deepcopy(seq.__dict__ | {"pages": None}) for seq in twin.cache.table.sequences]
    shapes = [[(list(p.slots), p.sealed) for p in s.pages] for s in twin.cache.table.sequences]
    sizes = [[len(page.slots) for page in s.pages] for s in twin.cache.table.sequences]
    used = twin.cache.table.num_used
    if stage == "written":
        twin.forward([count, count], commit=False)
    else:
        twin.begin([count, count])
        if stage == "half written":
            twin.cache.write(0, *twin.random_kv(2, count))
        twin.cache.abort()
    assert not twin.cache.is_running
    twin.check()
    assert twin.cache.table.num_used == used
    for seq, old, size in zip(twin.cache.table.sequences, before, sizes, strict=True):
        assert (seq.length, seq.num_committed) == (old["length"], old["num_committed"])
        assert [len(page) for page in seq.pages] == size
    if count < 10:  # no growth: the very same slots
        now = [[(list(p.slots), p.sealed) for p in s.pages] for s in twin.cache.table.sequences]
        assert now == shapes
    twin.forward([2, 5])
    twin.check()


def test_an_aborted_first_forward_leaves_an_empty_cache() -> None:
    """It must serve another batch size and another dtype afterwards, like any empty cache."""
    twin = DenseTwin(page_size=4)
    twin.begin([5, 5])
    twin.cache.write(0, *twin.random_kv(2, 5))
    twin.cache.abort()
    assert twin.cache.batch_size == 0
    twin.forward([5, 5, 5])
    twin.check()


def test_a_first_forward_of_the_wrong_dtype_does_not_bind_the_cache() -> None:
    twin = DenseTwin(page_size=4)
    twin.begin([5])
    keys, values = twin.random_kv(1, 5)
    twin.cache.write(0, keys.double(), values.double())
    twin.cache.abort()
    twin.cache.reset()
    twin.forward([5])
    twin.check()


def test_truncate_drops_the_end_of_each_row() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([30, 11])
    for lengths in ([30, 11], [17, 11], [16, 3], [1, 0]):
        twin.truncate(lengths)
        twin.check()
    assert twin.cache.counters.tokens_dropped == 40
    twin.forward([9, 9])
    twin.check()


def test_reorder_shares_forks_and_frees() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([10, 7, 9])
    for rows in ([2, 1, 0], [0, 0, 1], [1, 1, 1], [0], [0, 0, 0, 0], [3, 1, 2, 0]):
        twin.reorder(rows)
        twin.check()
        twin.forward([1] * len(rows))
        twin.forward([3] * len(rows))
        twin.check()
    twin.truncate([5, 14, 2, 8])  # some cuts go through shared pages
    twin.check()
    twin.forward([4, 4, 4, 4])
    twin.check()


def test_cuts_of_shared_pages_make_room_first() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([12])
    twin.reorder([0] * 6)
    twin.truncate([5, 6, 7, 9, 10, 11])
    twin.check()
    twin.forward([3] * 6)
    twin.check()


def test_a_clone_is_independent() -> None:
    twin = DenseTwin(page_size=4, track_hidden=True)
    twin.forward([10, 7])
    bounds = twin.cache.summaries.key_bounds(0, 0)
    clone = twin.cache.clone()
    frozen = copy.copy(twin)
    frozen.keys, frozen.values = [list(k) for k in twin.keys], [list(v) for v in twin.values]
    twin.truncate([3, 7])
    twin.forward([20, 20])
    twin.check()
    frozen.check(clone)
    assert torch.equal(clone.summaries.key_bounds(0, 0).lower, bounds.lower)
    clone.truncate([1, 1])
    clone.begin([RowRequest(2), RowRequest(2)], 2, CPU)
    clone.abort()
    clone.reset()
    twin.check()


def test_a_clone_of_a_cache_filled_with_gradients_on() -> None:
    twin = DenseTwin(page_size=4)
    twin.begin([5])
    keys, values = twin.random_kv(1, 5)
    for layer in range(2):
        twin.cache.write(layer, keys.requires_grad_(), values.requires_grad_())
    twin.cache.commit()
    assert torch.equal(twin.cache.clone().gather(1, 0)[0], keys.detach()[0])


def test_a_store_made_under_inference_mode_can_be_written_outside() -> None:
    twin = DenseTwin(page_size=4, track_hidden=True)
    with torch.inference_mode():
        twin.forward([5], reserve=64)
    twin.forward([30])  # into the same store
    assert twin.cache.counters.pool_growths == 1
    twin.forward([40])
    twin.check()


@pytest.mark.parametrize("what", ["keys dtype", "values dtype", "heads", "key dim", "value dim"])
def test_what_does_not_fit_is_refused_and_leaves_the_earlier_state(what: str) -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([6])
    keys, values = twin.random_kv(1, 1)
    if what == "keys dtype":
        keys = keys.to(torch.bfloat16)
    elif what == "values dtype":
        values = values.double()
    elif what == "heads":
        keys, values = keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1)
    elif what == "key dim":
        keys = keys[..., :4]
    else:
        values = values[..., :4]
    twin.begin([1])
    with pytest.raises(
        CacheMismatchError, match=r"layer 0.*got.*Allowed.*float32.*Use a new cache"
    ):
        twin.cache.write(0, keys, values)
    twin.cache.abort()
    twin.check()
    twin.forward([4])
    twin.check()


def test_use_outside_of_a_forward_is_refused() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([6])
    keys, values = twin.random_kv(1, 1)
    spec = LayerSpec(scaling=1.0)
    for call in (
        lambda: twin.cache.write(0, keys, values),
        lambda: twin.cache.attend(0, torch.zeros(1, 4, 1, 8), spec),
        lambda: twin.cache.commit(),
        lambda: twin.cache.plan,
    ):
        with pytest.raises(CacheMismatchError, match="outside a forward"):
            call()
    twin.check()


@pytest.mark.parametrize("step", ["begin", "truncate", "reorder", "clone", "reset"])
def test_an_unfinished_forward_is_dropped_by_the_next_step(step: str) -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([6, 3])
    twin.begin([5, 1])
    twin.cache.write(0, *twin.random_kv(2, 5))
    if step == "begin":
        twin.forward([2, 2])
    elif step == "truncate":
        twin.truncate([6, 3])
    elif step == "reorder":
        twin.reorder([1, 1])
    elif step == "clone":
        twin.check(twin.cache.clone())
    else:
        twin.reset()
    twin.check()
    assert not twin.cache.is_running
    twin.forward([1, 3])
    twin.check()


@pytest.mark.parametrize("call", ["begin", "truncate", "reorder", "gather", "clone"])
def test_a_growth_that_was_interrupted_is_never_read(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory half way: the data may be lost, but it must not come back wrong."""
    twin = DenseTwin(page_size=4)
    twin.forward([6, 3])
    twin.reorder([1, 0])  # else no page would move
    real, calls = kv_pool._moved, []

    def breaks(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(kv_pool, "_moved", breaks)
        with pytest.raises(MemoryError):
            twin.begin([100, 100])
    steps = {
        "begin": lambda: twin.begin([1, 1]),
        "truncate": lambda: twin.cache.truncate([1, 1]),
        "reorder": lambda: twin.cache.reorder([0, 0]),
        "gather": lambda: twin.cache.gather(0, 1),
        "clone": lambda: twin.cache.clone().gather(0, 1),
    }
    with pytest.raises(CacheMismatchError):
        steps[call]()
    twin.reset()
    twin.forward([9, 2])
    twin.check()


@pytest.mark.parametrize("requests", [[RowRequest(2)], [RowRequest(2)] * 3])
def test_a_plan_that_fails_leaves_no_tentative_tokens(requests: list[RowRequest]) -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([6, 3])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        twin.cache.begin(requests, 2, CPU)
    assert [seq.num_tentative for seq in twin.cache.table.sequences] == [0, 0]
    twin.check()
    twin.forward([1, 1])
    twin.check()


def test_reset_keeps_the_memory_and_takes_another_batch() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([20, 20])
    size = twin.cache.pool.bytes_allocated
    for counts in ([3], [2, 5, 1], [1, 1, 1, 1, 21]):
        twin.reset()
        assert twin.cache.batch_size == 0
        twin.forward(counts)
        twin.check()
    assert twin.cache.pool.bytes_allocated == size


def test_hidden_states_follow_their_tokens() -> None:
    twin = DenseTwin(page_size=4, track_hidden=True)
    for counts in ([6, 3], [1, 1], [2, 5], [1, 0]):
        twin.forward(counts)
    twin.reorder([1, 0, 1])
    twin.forward([9, 1, 2])
    for row, seq in enumerate(twin.cache.table.sequences):
        assert torch.equal(twin.cache.pool.hidden[seq.token_slots()], twin.hidden[row])
    without = DenseTwin(page_size=4)
    without.forward([3])
    assert without.cache.pool.hidden is None

"""The worker's queue, the orders in which is fetched ahead, and the modelled link, to the microsecond."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.config import PREFETCH_NAMES
from oval_core.errors import TierError
from oval_core.metrics import TierCounters
from oval_core.tiers.link import LinkModel
from oval_core.tiers.page_stream import ORDERS, PageStream
from oval_core.tiers.prefetcher import Prefetcher
from oval_core.tiers.transfer import Batch, Buffer, State, Transfer

CPU = torch.device("cpu")


def transfer_of(page_id: int, priority: float = 0.0, ahead: bool = True) -> Transfer:
    batch = Batch(0, (page_id,), (1,))
    return Transfer(batch, Buffer(8, CPU), 100 + page_id, priority, ahead)


class Gate:
    """A mover that can be held, and notes what it moved."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.moved: list[int] = []

    def __call__(self, transfer: Transfer) -> None:
        assert self.open.wait(5.0)
        self.moved.append(transfer.batch.page_ids[0])


def running(prefetcher: Prefetcher, gate: Gate) -> Transfer:
    """A transfer that the worker has begun and cannot end."""
    first = transfer_of(0, -9.0)
    prefetcher.submit(first)
    end = time.monotonic() + 5.0
    while first.state is not State.RUNNING:
        assert time.monotonic() < end
        time.sleep(0.0005)
    return first


def test_lower_priorities_go_first_and_equals_in_turn() -> None:
    gate = Gate()
    prefetcher = Prefetcher(gate, 9)
    first = running(prefetcher, gate)
    rest = [transfer_of(i, p) for i, p in ((1, 5.0), (2, 1.0), (3, 5.0), (4, -1.0), (5, 1.0))]
    for transfer in rest:
        prefetcher.submit(transfer)
    gate.open.set()
    for transfer in (first, *rest):
        prefetcher.wait(transfer)
        assert transfer.state is State.DONE
        assert transfer.error is None
    assert gate.moved == [0, 4, 2, 5, 1, 3]
    assert prefetcher.transfers == 6
    assert prefetcher.bytes_ahead == sum(t.num_bytes for t in (first, *rest))
    prefetcher.close()


def test_what_is_cancelled_in_the_queue_is_never_made() -> None:
    gate = Gate()
    prefetcher = Prefetcher(gate, 9)
    first = running(prefetcher, gate)
    second, third = transfer_of(1), transfer_of(2, ahead=False)
    prefetcher.submit(second)
    prefetcher.submit(third)
    assert not prefetcher.cancel(first), "one that runs is left to its end"
    assert prefetcher.cancel(second)
    assert prefetcher.cancel(second)
    gate.open.set()
    prefetcher.wait(third)
    prefetcher.settle(second)
    assert gate.moved == [0, 2]
    assert first.state is State.DONE
    assert not prefetcher.cancel(first)
    assert prefetcher.bytes_ahead == first.num_bytes
    with pytest.raises(TierError, match="closed"):
        prefetcher.wait(second)
    prefetcher.close()


def test_the_queue_is_bounded_and_closed_for_good() -> None:
    gate = Gate()
    prefetcher = Prefetcher(gate, 2)
    running(prefetcher, gate)
    waiting = [transfer_of(1), transfer_of(2)]
    for transfer in waiting:
        prefetcher.submit(transfer)
    with pytest.raises(AssertionError, match="more queued"):
        prefetcher.submit(transfer_of(3))
    threading.Timer(0.05, gate.open.set).start()
    thread = prefetcher._shared.thread
    prefetcher.close()
    prefetcher.close()
    assert thread is not None
    assert not thread.is_alive()
    assert [t.state for t in waiting] == [State.CANCELLED] * 2
    assert gate.moved == [0]
    with pytest.raises(AssertionError, match="submit after close"):
        prefetcher.submit(transfer_of(3))


def test_one_who_waits_when_another_closes_is_told() -> None:
    gate = Gate()
    prefetcher = Prefetcher(gate, 2)
    running(prefetcher, gate)
    queued = transfer_of(1)
    prefetcher.submit(queued)
    told: list[BaseException] = []

    def waits() -> None:
        try:
            prefetcher.wait(queued)
        except TierError as error:
            told.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    threading.Timer(0.05, gate.open.set).start()
    prefetcher.close()
    thread.join(5.0)
    assert len(told) == 1
    assert "was closed" in str(told[0])


SCRIPT = [Batch(layer, (10 * layer + i,), (4,)) for layer in (0, 1, 3) for i in (1, 2)]


@pytest.mark.parametrize(
    ("name", "layer", "pages"),
    [
        ("oracle", -1, [1, 2, 11, 12, 31, 32]),
        ("oracle", 1, [11, 12, 31, 32, 1, 2]),
        ("oracle", 3, [31, 32, 1, 2, 11, 12]),
        ("layer", -1, [1, 2]),
        ("layer", 0, [11, 12]),
        ("layer", 1, []),
        ("layer", 2, [31, 32]),
        ("layer", 3, [1, 2]),
        ("recent", -1, [2, 12, 32]),
        ("recent", 1, [12, 32, 2]),
        ("none", -1, []),
        ("none", 1, []),
    ],
)
def test_orders(name: str, layer: int, pages: list[int]) -> None:
    assert [batch.page_ids[0] for batch in ORDERS[name](SCRIPT, layer)] == pages
    assert list(ORDERS[name]([], layer)) == []


def test_every_order_has_a_name() -> None:
    assert tuple(sorted(ORDERS)) == PREFETCH_NAMES


def new_stream(name: str, buffers: int = 2, move: Any = None) -> tuple[PageStream, TierCounters]:
    counters = TierCounters()
    prefetcher = Prefetcher(move or (lambda transfer: None), buffers + 1)
    held = [Buffer(64, CPU) for _ in range(buffers)]
    return PageStream(prefetcher, held, [2] * 4, ORDERS[name], counters), counters


@pytest.mark.parametrize("name", PREFETCH_NAMES)
@pytest.mark.parametrize("buffers", [2, 3, 6])
def test_a_stream_reads_its_script_and_returns_every_buffer(name: str, buffers: int) -> None:
    stream, counters = new_stream(name, buffers)
    for _ in range(4):
        stream.begin(SCRIPT)
        for layer in (0, 1, 3):
            stream.approach(layer)
            batches = [batch for batch in SCRIPT if batch.layer == layer]
            read = [batch for batch, _ in stream.read(batches, lambda hit, n: None)]
            assert read == batches
        stream.end()
    stream.drain()
    assert len({id(buffer) for buffer in stream._free}) == buffers
    size = SCRIPT[0].num_tokens * 2
    assert counters.bytes_used + counters.bytes_demanded == 4 * len(SCRIPT) * size
    assert counters.bytes_used + counters.bytes_wasted == counters.bytes_prefetched
    if name == "none":
        assert counters.bytes_prefetched == 0
    if name == "oracle":
        assert counters.bytes_demanded == 0, "the known order is never surprised"
    stream._prefetcher.close()


def test_what_is_out_of_the_next_script_is_thrown_away() -> None:
    stream, counters = new_stream("oracle", 4)
    stream.begin(SCRIPT)
    assert {key[1][0] for key in stream._ahead} == {1, 2, 11, 12}
    stream.forget({2, 31})
    assert {key[1][0] for key in stream._ahead} == {1, 11, 12}
    assert [batch.page_ids[0] for batch in stream._script] == [1, 11, 12, 32]
    stream.begin(SCRIPT[4:])
    assert {key[1][0] for key in stream._ahead} == {31, 32}
    stream.drain()
    assert counters.bytes_wasted == counters.bytes_prefetched
    stream._prefetcher.close()


class Clock:
    def __init__(self) -> None:
        self.now = 10.0
        self.slept: list[float] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_link_takes_its_time_exactly() -> None:
    clock = Clock()
    link = LinkModel(2.0, 50.0, clock.read, clock.sleep)
    end = link.start(1_000_000)
    assert end == pytest.approx(10.0 + 50e-6 + 500e-6, abs=1e-12)
    clock.now += 200e-6  # what the real transfer took
    link.finish(end)
    assert clock.slept == [pytest.approx(350e-6, abs=1e-9)]
    clock.now = 11.0
    assert link.start(0) == pytest.approx(11.0 + 50e-6, abs=1e-12), "an idle link does not catch up"
    link.finish(10.5)
    assert len(clock.slept) == 1


def test_transfers_queue_up_on_a_link() -> None:
    clock = Clock()
    link = LinkModel(1.0, 0.0, clock.read, clock.sleep)
    ends = [link.start(3_000_000) for _ in range(3)]
    assert ends == pytest.approx([10.003, 10.006, 10.009], abs=1e-9)
    slow = LinkModel(None, 100.0, clock.read, clock.sleep)
    assert slow.start(10**12) == pytest.approx(10.0001, abs=1e-9)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 0.1)), min_size=1, max_size=8))
def test_a_link_is_never_faster_than_it_says(transfers: list[tuple[int, float]]) -> None:
    clock = Clock()
    link = LinkModel(4.0, 10.0, clock.read, clock.sleep)
    begin = clock.now
    for size, pause in transfers:
        clock.now += pause
        link.finish(link.start(size))
    least = sum(size / 4e9 + 10e-6 for size, _ in transfers)
    assert clock.now - begin >= least - 1e-9
    assert clock.now - begin <= least + sum(pause for _, pause in transfers) + 1e-9


@pytest.mark.parametrize("which", ["running", "queued"])
def test_an_interrupt_while_waiting_gives_the_buffer_back_unwritten(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that the worker may still write to must not be given away."""
    gate = Gate()
    stream, counters = new_stream("oracle", 2, gate)
    stream.begin(SCRIPT[:2])
    first, second = (stream._ahead[batch.key] for batch in SCRIPT[:2])
    end = time.monotonic() + 5.0
    while first.state is not State.RUNNING and time.monotonic() < end:
        time.sleep(0.0005)

    def interrupted(self: Prefetcher, transfer: Transfer) -> None:
        threading.Timer(0.05, gate.open.set).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Prefetcher, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream.read([SCRIPT[which == "queued"]], lambda hit, n: None))
    if which == "queued":
        assert second.state is State.CANCELLED
    else:
        assert first.state is State.DONE
    stream.drain()
    assert len(stream._free) == 2
    assert counters.bytes_used + counters.bytes_wasted == counters.bytes_prefetched
    stream._prefetcher.close()

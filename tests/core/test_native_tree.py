"""The compiled attention of a few new tokens: right at every shape on every path, and the same bits for a token
whatever its neighbours are."""

from __future__ import annotations

import functools
import platform
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tree import RandomTree, path_attention

from oval_core.attention import create_backend
from oval_core.attention.base import read
from oval_core.attention.native import NativeBackend
from oval_core.errors import BackendUnavailableError
from oval_core.kv_pool import LayerStore
from oval_core.native import build, kernels
from oval_core.native.linear import PATHS
from oval_core.native.tree import MOST_NEW, TreeKernel, load_tree
from oval_core.values import LayerSpec, RowPlan, Segment, StepPlan

needs_compiler = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=f"{kernels.unavailable_reason()}"
)
needs_fast_path = pytest.mark.skipif(
    kernels.unavailable_reason() is not None or not load_tree(64).counts,
    reason="plain C only: the backend keeps to torch",
)
each_path = pytest.mark.parametrize("path", PATHS)


@functools.cache
def on(dim: int, path: str) -> TreeKernel:
    """The kernel on one path; skips where the processor lacks it."""
    try:
        return TreeKernel(dim, path)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def chain(count: int) -> RandomTree:
    tree = RandomTree(count, random.Random(0))
    tree.parents = list(range(-1, count - 1))
    return tree


class Row:
    """A pool that is NaN but for one row's keys, whose slots lie as `layout` says; its new tokens are a tree."""

    def __init__(
        self,
        tree: RandomTree,
        past: int,
        kv_heads: int,
        group: int,
        dim: int,
        layout: str,
        seed: int,
    ) -> None:
        self.tree, self.past, count = tree, past, len(tree)
        length = past + count
        self.segments = segments(layout, length, random.Random(seed))
        slots = torch.cat([as_slots(part) for part in self.segments])
        assert len(slots) == length
        self.store = LayerStore(
            *(torch.full((kv_heads, 2 * length + 3, dim), float("nan")).bfloat16() for _ in "kv")
        )
        for at, pool in enumerate((self.store.keys, self.store.values)):
            pool[:, slots] = made(kv_heads, length, dim, seed=seed + at)
        self.query = made(count, kv_heads * group, dim, seed=seed + 2).transpose(0, 1)
        self.spec = LayerSpec(1.5 * dim**-0.5)
        self.plan = RowPlan(count, length, length, self.segments, tree=tree.seen())

    def run(self, kernel: TreeKernel, seen: torch.Tensor | None) -> torch.Tensor:
        return kernel(
            self.query, self.store.keys, self.store.values, self.segments, seen, self.spec.scaling
        )

    def want(self) -> torch.Tensor:
        keys, values = (read(pool, self.segments) for pool in (self.store.keys, self.store.values))
        old, new = (
            [t[:, part] for t in (keys, values)]
            for part in (slice(0, self.past), slice(self.past, None))
        )
        return path_attention(self.tree, self.query, tuple(old), tuple(new), self.spec)


def segments(layout: str, length: int, rng: random.Random) -> tuple[Segment, ...]:
    if layout == "even":
        start = rng.randrange(4)
        return (slice(start, start + length),)
    order = torch.tensor(rng.sample(range(2 * length), length))
    if layout == "scattered":
        return (order,)
    cut = rng.randrange(length + 1)  # a slice, then every second slot behind it
    return tuple(
        part
        for part in (slice(1, 1 + cut), torch.arange(cut + 1, 2 * length - cut + 1, 2))
        if len(as_slots(part))
    )


def as_slots(part: Segment) -> torch.Tensor:
    return torch.arange(part.start, part.stop) if isinstance(part, slice) else part


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == torch.bfloat16
    # weights of older keys and outputs are rounded to bf16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-7)


@needs_compiler
@each_path
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, MOST_NEW),
    st.sampled_from([0, 1, 15, 63, 64, 65, 255, 256, 300, 700, 1100]),
    st.sampled_from([(1, 1), (3, 3), (2, 1), (1, 8), (2, 5)]),
    st.sampled_from([16, 64, 80]),
    st.sampled_from(["even", "scattered", "mixed"]),
    st.integers(0, 99),
)
def test_each_token_sees_the_text_and_its_path(
    path: str, count: int, past: int, heads: tuple[int, int], dim: int, layout: str, seed: int
) -> None:
    row = Row(RandomTree(count, random.Random(seed)), past, *heads, dim, layout, seed)
    check(row.run(on(dim, path), row.tree.seen()), row.want())


@needs_compiler
@each_path
@pytest.mark.parametrize(("count", "past"), [(1, 0), (2, 40), (16, 256), (33, 0), (64, 900)])
def test_without_a_tree_tokens_are_a_chain(path: str, count: int, past: int) -> None:
    row = Row(chain(count), past, 3, 3, 64, "mixed", count)
    got = row.run(on(64, path), None)
    check(got, row.want())
    assert torch.equal(got, row.run(on(64, path), row.tree.seen()))


@needs_compiler
@each_path
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("past", [0, 37, 700])
def test_a_token_of_a_tree_has_the_bits_of_its_path_alone(path: str, dim: int, past: int) -> None:
    """Its neighbours, its place among them and how the slots lie change nothing."""
    row = Row(RandomTree(40, random.Random(past)), past, 2, 3, dim, "scattered", past)
    together = row.run(on(dim, path), row.tree.seen())
    slots = row.segments[0]
    assert isinstance(slots, torch.Tensor)
    for node in (0, 1, 7, 22, 39):
        places = torch.tensor(row.tree.path(node))
        alone = on(dim, path)(
            row.query[:, places], row.store.keys, row.store.values,
            (slots[:past], slots[past + places]), None, row.spec.scaling,
        )  # fmt: skip
        assert torch.equal(alone, together[places]), node
    # all text in one run, as a cache that was moved would hold it
    keys, values = (read(pool, row.segments) for pool in (row.store.keys, row.store.values))
    length = slice(0, past + 40)
    moved = on(dim, path)(row.query, keys, values, (length,), row.tree.seen(), row.spec.scaling)
    assert torch.equal(moved, together)


@needs_compiler
@each_path
@pytest.mark.parametrize(("past", "kv_heads"), [(0, 3), (300, 1), (1700, 3), (9000, 1)])
def test_any_number_of_threads_gives_the_same_bits(path: str, past: int, kv_heads: int) -> None:
    row = Row(RandomTree(13, random.Random(1)), past, kv_heads, 3, 64, "mixed", 5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(row.run(on(64, path), row.tree.seen()))
    finally:
        torch.set_num_threads(before)
    check(results[0], row.want())
    assert all(torch.equal(result, results[0]) for result in results)


@needs_compiler
@each_path
def test_a_token_that_sees_nothing_gets_zeros_and_nan_stays_in_its_row(path: str) -> None:
    row = Row(chain(20), 0, 2, 3, 64, "even", 1)
    seen = row.tree.seen()
    clean = row.run(on(64, path), seen)
    seen[4] = False
    row.query[:, 9] = float("nan")
    got = row.run(on(64, path), seen)
    assert (got[4] == 0).all()
    assert got[9].isnan().all()
    others = torch.tensor([n for n in range(20) if n not in (4, 9)])
    assert torch.equal(got[others], clean[others])


@needs_compiler
@each_path
def test_large_scores_neither_overflow_nor_lose_the_others(path: str) -> None:
    row = Row(RandomTree(6, random.Random(0)), 600, 1, 2, 64, "even", 3)
    row.spec = replace(row.spec, scaling=8.0)  # scores of hundreds, most weights vanish
    check(row.run(on(64, path), row.tree.seen()), row.want())


@needs_fast_path
def test_the_kernel_is_taken_where_it_fits_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = TreeKernel.__call__

    def counted(self: TreeKernel, query: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(query.shape[1])
        return original(self, query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TreeKernel, "__call__", counted)
    native, torch_backend = NativeBackend(), create_backend("torch")
    row = Row(RandomTree(12, random.Random(2)), 90, 3, 3, 64, "mixed", 1)
    query, plain = row.query[None], row.plan
    windows = replace(row.spec, window=50)
    hidden = torch.zeros(plain.length, dtype=torch.bool)
    hidden[3] = True
    cases = [
        (True, plain, row.spec, None),
        (True, replace(plain, tree=None), row.spec, None),
        (True, plain, replace(row.spec, window=plain.length), None),
        (False, replace(plain, positions=torch.arange(plain.length)), windows, None),
        (False, plain, replace(row.spec, softcap=5.0), None),
        (False, replace(plain, hidden=hidden), row.spec, None),
        (False, plain, row.spec, torch.zeros(1, 1, 12, plain.length).bfloat16()),
    ]
    for expected, plan, spec, bias in cases:
        calls.clear()
        step = StepPlan(12, (plan,), bias=bias)
        got = native.attend(query, row.store, step, spec)
        assert bool(calls) is expected, (plan, spec)
        want = torch_backend.attend(query, row.store, step, spec)
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    calls.clear()
    wide = LayerStore(row.store.keys.float(), row.store.values.float())
    native.attend(query.float(), wide, StepPlan(12, (plain,)), row.spec)
    keys, values = (read(pool, row.segments) for pool in (row.store.keys, row.store.values))
    joined = replace(plain, num_new=1, tree=None, segments=(slice(0, plain.length),))
    one = native.attend(
        query[:, :, -1:], LayerStore(keys, values), StepPlan(1, (joined,)), row.spec
    )
    long = Row(chain(MOST_NEW + 1), 3, 3, 3, 64, "even", 4)
    native.attend(
        long.query[None],
        long.store,
        StepPlan(MOST_NEW + 1, (replace(long.plan, tree=None),)),
        row.spec,
    )
    assert not calls, "float32, one token over one run, many tokens"
    apart = StepPlan(1, (replace(plain, num_new=1, tree=None),))
    got = native.attend(query[:, :, -1:], row.store, apart, row.spec)
    assert calls == [1]
    torch.testing.assert_close(got.float(), one.float(), rtol=2e-2, atol=2e-2)


@needs_fast_path
def test_rows_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree, a chain and nothing, side by side, with padding in front."""
    first = Row(RandomTree(9, random.Random(3)), 70, 3, 3, 64, "even", 1)
    places = torch.arange(2, 7)
    rows = (
        first.plan,
        replace(first.plan, num_new=5, tree=None, query_places=places),
        replace(first.plan, num_new=0, tree=None),
    )
    query = torch.zeros(3, 9, 9, 64).bfloat16()
    query[0], query[1, :, 2:7] = first.query, first.query[:, 4:9]
    plan = StepPlan(9, rows)
    got = NativeBackend().attend(query, first.store, plan, first.spec)
    want = create_backend("torch").attend(query, first.store, plan, first.spec)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    assert (got[2] == 0).all()
    assert (got[1, [0, 1, 7, 8]] == 0).all()


@needs_compiler
def test_a_missing_path_and_a_kernel_that_is_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_tree(64).path in PATHS
    original = TreeKernel.__call__
    monkeypatch.setattr(
        TreeKernel, "__call__", lambda self, *arguments: original(self, *arguments) * 1.1
    )
    with pytest.raises(BackendUnavailableError, match="self-check"):
        TreeKernel(64)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
@pytest.mark.parametrize("processor", ["x86-64"])
def test_on_lesser_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processor: str
) -> None:
    """What is behind the special instructions is plain C, also where vectors are short."""
    flags = tuple(f"-march={processor}" if "-march" in flag else flag for flag in build._FLAGS)
    monkeypatch.setattr(build, "_FLAGS", flags)
    monkeypatch.setenv("OVAL_CACHE", str(tmp_path))
    kernel = TreeKernel(80)
    assert kernel.path == "plain"
    row = Row(RandomTree(21, random.Random(4)), 300, 2, 3, 80, "mixed", 6)
    got = row.run(kernel, row.tree.seen())
    check(got, row.want())
    path = torch.tensor(row.tree.path(20))
    slots = torch.cat([as_slots(part) for part in row.segments])
    alone = kernel(
        row.query[:, path], row.store.keys, row.store.values,
        (torch.cat([slots[:300], slots[300 + path]]),), None, row.spec.scaling,
    )  # fmt: skip
    assert torch.equal(alone, got[path])

"""Pages selected together: the graph equals a plain recount after any operations, also over two ranks."""

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oval_core.errors import ConfigError
from oval_core.routing.cooccurrence import (
    DEFAULT_REBUILD_EVERY,
    DEFAULT_WINDOW_PAIRS,
    CooccurrenceGraph,
)

PAGES = range(9)
Pair = tuple[int, int]


class PlainGraph:
    """Slow oracle: a plain list of pairs, counted one by one."""

    def __init__(self, window_pairs: int, rebuild_every: int) -> None:
        self.window_pairs, self.rebuild_every = window_pairs, rebuild_every
        self.reset()

    def reset(self) -> None:
        self.pairs: list[Pair] = []
        self.graph: Counter[Pair] = Counter()
        self.steps = 0

    def observe(self, *selections: Sequence[int]) -> bool:
        for selection in selections:
            pages = list(dict.fromkeys(selection))
            for i in reversed(range(len(pages))):
                for j in reversed(range(i)):
                    self.pairs.append((min(pages[i], pages[j]), max(pages[i], pages[j])))
        self.pairs = self.pairs[-self.window_pairs :]
        self.steps += 1
        if self.steps == self.rebuild_every:
            self.rebuild()
        return self.steps == 0

    def rebuild(self) -> None:
        self.steps = 0
        self.graph = Counter(self.pairs)

    def forget(self, gone: Sequence[int]) -> None:
        self.pairs = [pair for pair in self.pairs if not set(pair) & set(gone)]
        self.graph = Counter({p: n for p, n in self.graph.items() if not set(p) & set(gone)})

    def density(self) -> float:
        pages = {page for pair in self.graph for page in pair}
        entries = [(i, j) for i in pages for j in pages if self.graph[min(i, j), max(i, j)]]
        return len(entries) / len(pages) ** 2 if pages else 0.0

    def adjacency(self, page_ids: Sequence[int]) -> torch.Tensor:
        size = len(page_ids)
        a = torch.eye(size, dtype=torch.float64)
        for r, i in enumerate(page_ids):
            for c, j in enumerate(page_ids):
                a[r, c] += self.graph[min(i, j), max(i, j)] if i != j else 0
        d = torch.diag(a.sum(1) ** -0.5)
        return (d @ a @ d).float()


def assert_adjacency(graph: CooccurrenceGraph, plain: PlainGraph, pages: Sequence[int]) -> None:
    matrix = graph.adjacency(pages)
    assert matrix.is_sparse
    assert matrix.dtype == torch.float32
    expected = plain.adjacency(pages)
    torch.testing.assert_close(matrix.to_dense(), expected)
    assert matrix._nnz() == int((expected != 0).sum()), "it stores zeros or doubles"
    index = matrix.indices()
    flat = index[0] * len(pages) + index[1]
    assert (flat[1:] > flat[:-1]).all(), "called coalesced, but not in order"


selections = st.lists(st.sampled_from(PAGES), max_size=7)


class GraphMachine(RuleBasedStateMachine):
    """Some graphs and their oracles side by side; every rule picks one of them."""

    @initialize(window=st.integers(1, 40), every=st.integers(1, 4))
    def start(self, window: int, every: int) -> None:
        self.graphs = [(CooccurrenceGraph(window, every), PlainGraph(window, every))]

    def pick(self, which: int) -> tuple[CooccurrenceGraph, PlainGraph]:
        return self.graphs[which % len(self.graphs)]

    @rule(which=st.integers(0, 9), groups=st.lists(selections, max_size=3))
    def observe(self, which: int, groups: list[list[int]]) -> None:
        graph, plain = self.pick(which)
        assert graph.observe(*groups) == plain.observe(*groups)

    @rule(which=st.integers(0, 9), gone=st.lists(st.sampled_from(PAGES), max_size=3))
    def forget(self, which: int, gone: list[int]) -> None:
        for graph in self.pick(which):
            graph.forget(gone)

    @rule(which=st.integers(0, 9))
    def rebuild(self, which: int) -> None:
        for graph in self.pick(which):
            graph.rebuild()

    @rule(which=st.integers(0, 9))
    def reset(self, which: int) -> None:
        for graph in self.pick(which):
            graph.reset()

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        graph, plain = self.pick(which)
        self.graphs = [*self.graphs[-3:], (graph.copy(), copy.deepcopy(plain))]

    @rule(which=st.integers(0, 9), pages=st.lists(st.sampled_from(PAGES), unique=True))
    def look(self, which: int, pages: list[int]) -> None:
        graph, plain = self.pick(which)
        assert_adjacency(graph, plain, pages)
        assert_adjacency(graph, plain, [*pages, 20, 30])  # pages that came later

    @invariant()
    def same_counts(self) -> None:
        for graph, plain in self.graphs:
            assert graph.counts() == dict(plain.graph)
            assert graph.density == pytest.approx(plain.density())


GraphMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
test_any_operations_equal_a_recount = GraphMachine.TestCase


def test_the_articles_window_is_a_setting() -> None:
    graph = CooccurrenceGraph(window_pairs=128, rebuild_every=100)
    plain = PlainGraph(128, 100)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 251):
        pages = torch.randperm(40, generator=generator)[:4].tolist()
        assert graph.observe(pages) == (step in (100, 200))
        plain.observe(pages)
    assert sum(graph.counts().values()) == 128
    assert_adjacency(graph, plain, range(40))
    assert 0.05 < graph.density < 0.2


def test_nothing_is_seen_before_the_first_rebuild() -> None:
    graph = CooccurrenceGraph()
    for _ in range(DEFAULT_REBUILD_EVERY - 1):
        assert not graph.observe([1, 2])
    assert torch.equal(graph.adjacency([2, 1]).to_dense(), torch.eye(2))
    assert graph.observe([1, 2])
    assert graph.counts() == {(1, 2): DEFAULT_REBUILD_EVERY}


def test_a_selection_beyond_the_window_keeps_its_first_pages() -> None:
    graph = CooccurrenceGraph(window_pairs=6, rebuild_every=1)
    graph.observe([50, 3, 40, 7, *range(100, 100_000)])  # all pairs would take 40 GB
    best = [(3, 40), (3, 50), (7, 50), (40, 50), (3, 7), (7, 40)]
    assert graph.counts() == dict.fromkeys(best, 1)


def test_a_copy_and_its_original_write_apart() -> None:
    graph = CooccurrenceGraph()
    graph.observe([1, 2, 3])  # leaves room behind the window
    twin = graph.copy()
    graph.observe([1, 4])
    twin.observe([2, 5])
    graph.rebuild()
    twin.rebuild()
    common = {(1, 2): 1, (1, 3): 1, (2, 3): 1}
    assert graph.counts() == common | {(1, 4): 1}
    assert twin.counts() == common | {(2, 5): 1}


def test_memory_stays_within_the_stated_bound() -> None:
    graph = CooccurrenceGraph(window_pairs=1000, rebuild_every=7)
    for step in range(300):
        graph.observe(range(step, step + 60))
        graph.adjacency(range(step, step + 60))
        matrix = graph._adjacency[1]
        held = graph._buffer.nbytes + graph._graph.keys.nbytes + graph._graph.counts.nbytes
        held += matrix.indices().nbytes + matrix.values().nbytes
        assert held <= 72 * 1000 + 20 * 60


def test_a_kept_adjacency_follows_pages_rebuilds_and_forgetting() -> None:
    graph, plain = CooccurrenceGraph(rebuild_every=2), PlainGraph(DEFAULT_WINDOW_PAIRS, 2)
    for both in (graph, plain):
        both.observe([1, 2, 3], [2, 5])
        both.observe([1, 2, 9])
    first = graph.adjacency([1, 2, 3])
    assert graph.adjacency([1, 2, 3]) is first
    for pages in ([1, 2, 3, 5], [1, 2, 3, 5, 9], [1, 2, 3, 5, 9, 10, 11], [1, 2], [2, 1]):
        assert_adjacency(graph, plain, pages)
    for both in (graph, plain):
        both.forget([9])
    assert_adjacency(graph, plain, [1, 2, 3, 5, 9])


def test_an_adjacency_made_in_inference_mode_can_be_trained_with() -> None:
    graph = CooccurrenceGraph(rebuild_every=1)
    with torch.inference_mode():
        graph.observe([0, 1])
        graph.adjacency(range(2))
    features = torch.ones(2, 1, requires_grad=True)
    torch.sparse.mm(graph.adjacency(range(2)), features).sum().backward()
    torch.testing.assert_close(features.grad, torch.ones(2, 1))


def test_without_ranks_all_reduce_does_nothing() -> None:
    graph = CooccurrenceGraph(rebuild_every=3)
    graph.observe([1, 2])
    graph.all_reduce()
    assert graph.counts() == {}
    graph.observe([1, 2])
    assert graph.observe([1, 2])
    assert graph.counts() == {(1, 2): 3}


STEPS = {0: [[[1, 2, 3]], [[2, 3], [3, 9]], [[1, 3]]], 1: [[], [[2, 3, 70]], [[5, 6], [70, 5]]]}


def rank_main(rank: int, folder: str) -> None:
    """One of two ranks; the other one is another process, so what was seen goes to a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        seen = observe_and_reduce(rank)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def observe_and_reduce(rank: int) -> list:
    graph = CooccurrenceGraph(rebuild_every=2)
    seen: list = []

    def note() -> None:
        matrix = graph.adjacency([3, 2, 1, 70, 5]).to_dense().tolist()
        seen.append([sorted([*pair, n] for pair, n in graph.counts().items()), matrix])

    graph.all_reduce()
    note()  # 0: nobody saw anything
    for selections_of_step in STEPS[rank]:
        graph.observe(*selections_of_step)
        graph.all_reduce()
        note()  # 1, 2, 3: rank 1 saw nothing before 2
    graph.all_reduce()
    note()  # 4: nothing new
    due = [graph.observe([8, 10 + rank]) for _ in range(4)]
    note()  # 5: as before, though the ranks saw more than `rebuild_every` steps
    twin = graph.copy()
    graph.forget([70])
    note()  # 6: also gone where only the other rank had seen it
    graph.all_reduce()
    note()  # 7
    seen.append([due, sorted([*pair, n] for pair, n in twin.counts().items())])
    return seen


def summed(num_steps: int) -> Counter[Pair]:
    total: Counter[Pair] = Counter()
    for steps in STEPS.values():
        plain = PlainGraph(1000, 1)
        for selections_of_step in steps[:num_steps]:
            plain.observe(*selections_of_step)
        total += plain.graph
    return total


def test_two_ranks_hold_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # this file run as a script: a spawned worker could not import a test module by its name
    other = subprocess.Popen([sys.executable, __file__, "1", str(tmp_path)])
    try:
        rank_main(0, str(tmp_path))
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()
    texts = [(tmp_path / f"{rank}.json").read_text(encoding="utf-8") for rank in range(2)]
    assert texts[0] == texts[1]
    *notes, (due, twin) = json.loads(texts[0])
    seen = [{(i, j): n for i, j, n in counts} for counts, _ in notes]
    assert seen[:6] == [dict(summed(n)) for n in (0, 1, 2, 3, 3, 3)]
    remaining = {pair: n for pair, n in summed(3).items() if 70 not in pair}
    assert seen[6] == remaining
    assert seen[7] == remaining | {(8, 10): 4, (8, 11): 4}
    assert {(i, j): n for i, j, n in twin} == dict(summed(3))
    assert due == [False, True, False, True]
    plain = PlainGraph(1000, 1)
    plain.graph = summed(3)
    torch.testing.assert_close(torch.tensor(notes[3][1]), plain.adjacency([3, 2, 1, 70, 5]))


@pytest.mark.parametrize(
    "page_ids", [[-1, 2], [1.5], [True, False], [2**31, 1], [[1, 2], [3, 4]], [[1], [2, 3]], ["a"]]
)
def test_bad_page_ids_are_refused(page_ids: list) -> None:
    graph = CooccurrenceGraph()
    for call in (graph.observe, graph.forget, graph.adjacency):
        with pytest.raises(ConfigError, match=r"page_ids: got .* Allowed: a flat list"):
            call(page_ids)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"window_pairs: got 0\. Allowed: 1 or more"):
        CooccurrenceGraph(window_pairs=0)
    with pytest.raises(ConfigError, match="rebuild_every: got 1.5"):
        CooccurrenceGraph(rebuild_every=1.5)
    with pytest.raises(ConfigError, match="got 3 pages of which only 2 differ"):
        CooccurrenceGraph().adjacency([1, 2, 1])


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])

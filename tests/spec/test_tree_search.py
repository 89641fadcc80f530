"""Search of trees: as good as any tree there is, from accuracies and from probabilities along the paths."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import reference_best_tau, reference_grown, token_paths, worth

from oval_core.errors import ConfigError
from oval_spec.tree_search import Frontier, expected_tau, grow_trees, search_tree, tau_by_nodes

# Twelve paths at most, so that every subset can be tried.
SMALL = st.sampled_from([(3, 2), (2, 1, 1), (2, 2), (1, 3), (4, 1)]).flatmap(
    lambda sizes: st.tuples(
        *(st.lists(st.floats(0, 1), min_size=size, max_size=size) for size in sizes)
    )
)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(SMALL, st.integers(1, 7))
def test_greedy_search_finds_the_best_tree(accuracy: tuple[list[float], ...], nodes: int) -> None:
    shape = search_tree(accuracy, nodes)
    assert shape.num_nodes <= nodes
    assert expected_tau(shape, accuracy) == pytest.approx(reference_best_tau(accuracy, nodes))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(SMALL, st.integers(1, 12))
def test_smaller_trees_are_the_first_nodes(accuracy: tuple[list[float], ...], nodes: int) -> None:
    whole = search_tree(accuracy, 100)
    assert whole.first(nodes) == search_tree(accuracy, nodes)
    values = [worth(path, accuracy) for path in whole.by_value]
    assert values == sorted(values, reverse=True)
    tau = tau_by_nodes(whole, accuracy)
    assert len(tau) == whole.num_nodes
    assert tau[min(nodes, len(tau)) - 1] == pytest.approx(
        expected_tau(whole.first(nodes), accuracy)
    )


def test_certain_heads_give_a_chain_and_equal_ones_go_wide() -> None:
    assert search_tree([[1.0, 0.0]] * 4, 5).by_value == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert search_tree([[0.3, 0.3, 0.3]] * 2, 4).by_value == ((0,), (1,), (2,))
    # (1,) and (0, 0) are worth the same: the one that needs fewer heads comes first.
    assert search_tree([[0.5, 0.25], [0.5]], 3).by_value == ((0,), (1,))


def test_ranks_beyond_the_shape_are_left_alone() -> None:
    shape = search_tree([[0.05] * 20], 30)
    assert shape.num_nodes == 11, "a head offers 10 ranks"
    assert tau_by_nodes(shape, [[0.5]]) == pytest.approx([1.0, *[1.5] * 10])


def test_accuracy_must_be_a_share() -> None:
    with pytest.raises(ConfigError, match="got 36"):
        search_tree([[36, 12]], 4)


class Heads:
    """Children and probabilities that hang on the whole path; checks what it is asked."""

    def __init__(self, seed: int, width: int) -> None:
        self.seed, self.width = seed, width
        self.asked: list[int] = []
        self.last: torch.Tensor | None = None

    def log_probs_of(self, path: tuple[int, ...]) -> dict[int, float]:
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**31)
        tokens = torch.randperm(50, generator=generator)[: self.width]
        logs = torch.log_softmax(
            3 * torch.randn(self.width + 2, generator=generator, dtype=torch.float64), 0
        )
        return dict(zip(tokens.tolist(), logs[: self.width].tolist(), strict=True))

    def __call__(self, frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
        if self.last is None:
            assert frontier.parents.tolist() == list(range(len(frontier.rows)))
        else:
            assert torch.equal(self.last[frontier.parents], frontier.paths[:, :-1])
        self.last = frontier.paths
        self.asked.append(len(frontier.rows))
        found = [self.log_probs_of(tuple(path)) for path in frontier.paths.tolist()]
        tokens = torch.tensor([list(children) for children in found])
        logs = torch.tensor([list(c.values()) for c in found], dtype=torch.float64)
        return tokens, logs


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_grown_trees_hold_the_most_probable_nodes(seed: int, rows: list[tuple[int, int]]) -> None:
    heads = Heads(seed, 3)
    roots = list(range(len(rows)))
    trees = grow_trees(roots, heads, [n for n, _ in rows], [d for _, d in rows])
    for root, tree, (nodes, depth) in zip(roots, trees, rows, strict=True):
        expected = reference_grown(heads.log_probs_of, root, nodes, depth)
        assert set(token_paths(tree)) == set(expected)
    assert len(heads.asked) <= max(d for _, d in rows)


def test_only_nodes_that_can_matter_are_expanded() -> None:
    heads = Heads(3, 3)
    grow_trees([0], heads, [6], [4])
    assert all(asked <= 5 for asked in heads.asked), heads.asked
    narrow = Heads(3, 3)
    (tree,) = grow_trees([0], narrow, [6], [4], width=2)
    assert max(narrow.asked) <= 2
    assert len(tree) == 6


def test_impossible_tokens_are_not_drafted() -> None:
    def expand(frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
        # A log slightly above 0, as rounding leaves it, and one token that cannot be.
        count = len(frontier.rows)
        return torch.tensor([[4, 5]] * count), torch.tensor([[1e-7, -math.inf]] * count)

    for nodes in (2, 3, 8):
        (tree,) = grow_trees([9], expand, [nodes], [3])
        assert tree.tokens == (9, 4, 4, 4)[:nodes]
        assert tree.is_chain

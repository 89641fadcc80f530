"""Shapes of trees: what is refused, the order of nodes, tokens filled in, Medusa's buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import reference_buffers, token_paths

from oval_core.errors import ConfigError
from oval_spec.choices import TREES, generate_medusa_buffers, tree_named
from oval_spec.tree_shape import TreeShape

# by name: nodes by depth, leaves
PUBLISHED = {
    "mc_sim_7b_63": ([10, 28, 23, 2], 42),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
    "zephyr_stage2": ([10, 27, 23, 3], 44),
}


@st.composite
def choices(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """A tree's paths in any order."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 14))):
        above = draw(st.sampled_from([path for path in paths if len(path) < 5]))
        path = (*above, draw(st.integers(0, 9)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths[1:]))


@pytest.mark.parametrize("name", TREES)
def test_shipped_trees_have_64_nodes(name: str) -> None:
    assert tree_named(name).num_nodes == 64
    assert all(ranks == tuple(range(len(ranks))) for ranks in TREES[name].ranks)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_trees_have_the_published_counts(name: str) -> None:
    by_depth, leaves = PUBLISHED[name]
    paths = TREES[name].paths
    assert [sum(len(path) == d for path in paths) for d in (1, 2, 3, 4)] == by_depth
    assert len(TREES[name].medusa_buffers()["retrieve_indices"]) == leaves


def test_an_unknown_tree_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vicuna_7b_stage2'"):
        tree_named("vicuna_7b_stage_2")


@settings(deadline=None, derandomize=True, max_examples=40)
@given(choices())
def test_buffers_are_medusas(paths: list[tuple[int, ...]]) -> None:
    buffers = generate_medusa_buffers([list(path) for path in paths])
    expected = reference_buffers(paths)
    assert buffers["medusa_attn_mask"].shape == (1, 1, len(paths) + 1, len(paths) + 1)
    assert buffers.keys() == expected.keys()
    for name, value in buffers.items():
        assert value.squeeze((0, 1) if value.ndim == 4 else ()).tolist() == expected[name], name


def test_buffers_of_the_published_tree() -> None:
    # Worked out by hand from the rule: the leaf that sorts last comes first.
    buffers = generate_medusa_buffers([[0], [0, 0], [1]])
    assert buffers["tree_indices"].tolist() == [0, 1, 2, 11]
    assert buffers["medusa_position_ids"].tolist() == [0, 1, 1, 2]
    assert buffers["retrieve_indices"].tolist() == [[0, 1, 3], [0, 2, -1]]
    assert torch.equal(
        buffers["medusa_attn_mask"][0, 0],
        torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]),
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(choices(), st.integers(1, 16))
def test_the_first_nodes_are_a_tree(paths: list[tuple[int, ...]], num_nodes: int) -> None:
    shape = TreeShape.of(paths)
    assert set(shape.by_value) == set(paths)
    part = shape.first(num_nodes)
    assert part.num_nodes == min(num_nodes, shape.num_nodes)
    assert part.by_value == shape.by_value[: num_nodes - 1]
    assert shape.cut(2).paths == tuple(path for path in shape.paths if len(path) <= 2)
    assert shape.depth == max(map(len, paths))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(choices(), st.randoms())
def test_tokens_go_where_the_ranks_say(paths: list[tuple[int, ...]], random) -> None:
    shape = TreeShape.of(paths)
    ranked = [random.sample(range(100), 10) for _ in range(shape.num_nodes)]
    tree = shape.fill(7, ranked)
    node_of = {path: node for node, path in enumerate(((), *shape.paths))}
    expected = [
        (7, *(ranked[node_of[path[:d]]][path[d]] for d in range(len(path)))) for path in node_of
    ]
    assert token_paths(tree) == expected
    levels = [ranked[0]] * shape.depth
    assert shape.fill_levels(7, levels) == shape.fill(7, [ranked[0]] * shape.num_nodes)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [1, 0]], "before"),
        ([[0], [0]], "twice"),
        ([[0], [0, 10]], "ranks from 0 to 9"),
        ([[0], [-1]], "ranks from 0 to 9"),
        ([[]], "one or more ranks"),
        ([["0"]], "one or more ranks"),
        ([1, 7, 6], "lists of ranks"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TreeShape.of(paths)


def test_a_parent_that_comes_later_is_refused() -> None:
    with pytest.raises(ConfigError, match="got parent 2 for node 2"):
        TreeShape.from_parents([0, 2])
    with pytest.raises(ConfigError, match="in front of them"):
        TreeShape(((0, 0), (0,)))

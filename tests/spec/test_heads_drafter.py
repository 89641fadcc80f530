"""Trees from heads: against brute force, within each row's limits, the same alone as in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_heads import C, likeliest_paths, scatter_weights

from oval_core.errors import ConfigError
from oval_spec.choices import TREES
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.heads import Beam, DraftHeads, DraftVocabulary, HeadsDrafter, create_heads
from oval_spec.heads.tree_growth import Growth
from oval_spec.token_tree import TokenTree
from oval_spec.tree_shape import TreeShape

V = 20
WIDE = Beam(frontier=1000, children=1000)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {}),
    ("medusa", {"own_lm_heads": 6}),
    ("sequential", {"mlp_size": 8}),
    ("sequential", {"mlp_size": 8, "form": "prefix"}),
    ("sequential", {"mlp_size": 8, "context": 3}),
]


def make_heads(kind: str, shape: dict[str, Any], size: int = 6) -> DraftHeads:
    vocabulary = DraftVocabulary(torch.randperm(V)[:size], V)
    heads = create_heads(kind, {"num_heads": 3, "hidden_size": C} | shape, vocabulary)
    scatter_weights(heads)
    heads.bind(torch.randn(V, C), torch.randn(V, C))
    return heads.eval()


def request(row: int = 0, ids: Sequence[int] = (1, 2, 3, 4, 5), **limits: int) -> DraftRequest:
    allowed = {"max_depth": 3, "max_nodes": 12} | limits
    return DraftRequest(row, ids, torch.randn(C), **allowed)


@torch.no_grad()
def log_probs(heads: DraftHeads, asked: DraftRequest, path: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [V'] of the draft token after a path of draft tokens, by one path alone."""
    W = heads.context
    before = [heads.embed(torch.tensor([token]))[0] for token in asked.ids[-W - 1 :]]
    before = [torch.zeros(C)] * (W + 1 - len(before)) + before
    drafted = [heads.embed(heads.to_target(torch.tensor([token])))[0] for token in path]
    filler = [torch.full((C,), 9.0)] * (heads.num_heads - 1 - len(path))  # never seen
    states = heads(asked.hidden[None], torch.stack([*before, *drafted, *filler])[None])
    return heads.logits(states[:, len(path)], len(path))[0].float().log_softmax(-1)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))}


@pytest.mark.parametrize(("kind", "shape"), KINDS)
@pytest.mark.parametrize("ids", [(1, 2, 3, 4, 5), (7,)])
def test_a_wide_beam_finds_the_likeliest_nodes(
    kind: str, shape: dict[str, Any], ids: tuple[int, ...]
) -> None:
    heads = make_heads(kind, shape)
    asked = request(ids=ids)
    [draft] = HeadsDrafter(heads, beam=WIDE).draft([asked])
    best = likeliest_paths(lambda path: log_probs(heads, asked, path), 3, 11)
    wanted = {tuple(heads.to_target(torch.tensor(path)).tolist()) for path, _ in best}
    assert paths_of(draft.tree) == wanted
    assert draft.tree.tokens[0] == ids[-1]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_a_narrow_beam_keeps_to_its_width(kind: str, shape: dict[str, Any]) -> None:
    heads = make_heads(kind, shape)
    [draft] = HeadsDrafter(heads, beam=Beam(frontier=2, children=3)).draft([request(max_nodes=99)])
    depths, parents = draft.tree.depths, draft.tree.parents
    assert len(draft.tree) == 1 + 3 + 2 * 3 + 2 * 3
    for depth in (1, 2):
        inner = {parents[n] for n in range(len(parents)) if depths[n] == depth + 1}
        assert len(inner) == 2


@pytest.mark.parametrize(("kind", "shape"), KINDS)
@pytest.mark.parametrize("tree", [None, TREES["mc_sim_7b_63"].cut(3)])
def test_rows_are_drafted_as_if_alone(
    kind: str, shape: dict[str, Any], tree: TreeShape | None
) -> None:
    size = 6 if tree is None else 12
    heads = make_heads(kind, {"own_lm_heads": size} if shape.get("own_lm_heads") else shape, size)
    drafter = HeadsDrafter(heads, tree)
    requests = [
        request(0),
        request(1, max_depth=1),
        request(2, ids=(3,)),
        request(3, max_depth=0),
        request(4, max_nodes=1),
        request(5, max_nodes=4, max_depth=9),
    ]
    together = drafter.draft(requests)
    for asked, draft in zip(requests, together, strict=True):
        [alone] = drafter.draft([asked])
        assert draft.tree == alone.tree
        assert len(draft.tree) <= max(1, asked.max_nodes)
        assert max(draft.tree.depths) <= asked.max_depth
        assert draft.tree.tokens[0] == asked.ids[-1]
        if draft.states is None:
            assert len(draft.tree) == 1
            assert alone.states is None
        else:
            torch.testing.assert_close(draft.states, alone.states)
    assert [len(d.tree) for d in together][3:5] == [1, 1]
    assert len(together[5].tree) == 4


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_a_shape_is_filled_by_rank(kind: str, shape: dict[str, Any]) -> None:
    heads = make_heads(kind, shape)
    tree = TreeShape.of([(0,), (3,), (0, 1), (3, 0), (3, 2), (0, 1, 4), (1,), (0, 1, 0)])
    asked = request(max_nodes=8)  # without the last path
    [draft] = HeadsDrafter(heads, tree).draft([asked])
    wanted = set()
    for ranks in tree.by_value[:7]:
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, int(log_probs(heads, asked, path).argsort(descending=True)[rank]))
        wanted.add(tuple(heads.to_target(torch.tensor(path)).tolist()))
    assert paths_of(draft.tree) == wanted


@pytest.mark.parametrize(("kind", "shape"), KINDS)
@torch.no_grad()
def test_states_are_those_of_the_likeliest_path(kind: str, shape: dict[str, Any]) -> None:
    heads = make_heads(kind, shape)
    asked = request(max_depth=2)
    [draft] = HeadsDrafter(heads, beam=Beam(frontier=1)).draft([asked])
    first = draft.tree.tokens[1]  # likeliest first
    W = heads.context
    tokens = torch.tensor([*asked.ids[-W - 1 :], first, 0])
    states = heads(asked.hidden[None], heads.embed(tokens)[None])[0]
    torch.testing.assert_close(draft.states, states[:2])


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_growth_ends_where_little_can_follow(kind: str, shape: dict[str, Any]) -> None:
    heads = make_heads(kind, shape)
    requests = [request(0), request(1)]
    tops = [log_probs(heads, asked, ()).exp().topk(2).values.sum() for asked in requests]
    surest = float(max(tops))
    for least, depth in ((surest * 0.999, 3), (surest * 1.001, 1)):
        # The second level's frontier holds less than the first's; only the first is asked about here.
        narrow = Beam(frontier=2, children=2, least_mass=min(1.0, least))
        drafts = HeadsDrafter(heads, beam=narrow).draft(requests)
        levels = {max(draft.tree.depths) for draft in drafts}
        assert levels == {1} if depth == 1 else min(levels) > 1
        assert all(
            draft.states is not None and len(draft.states) == max(levels) for draft in drafts
        )


def test_no_limits_ask_nothing() -> None:
    drafter = HeadsDrafter(make_heads("medusa", {}))
    assert drafter.draft([]) == []
    drafts: list[Draft] = drafter.draft([request(max_depth=0)])
    assert [len(draft.tree) for draft in drafts] == [1]


def test_bfloat16_heads_draft_on_a_bfloat16_base() -> None:
    heads = make_heads("sequential", {"mlp_size": 8, "context": 2}).bfloat16()
    heads.bind(torch.randn(V, C).bfloat16(), torch.randn(V, C).bfloat16())
    asked = DraftRequest(0, (1, 2, 3), torch.randn(C).bfloat16(), 3, 9)
    [draft] = HeadsDrafter(heads).draft([asked])
    assert len(draft.tree) == 9
    assert draft.states is not None
    assert draft.states.dtype == torch.bfloat16


def test_bad_drafters_are_refused() -> None:
    heads = make_heads("medusa", {})
    with pytest.raises(ConfigError, match="tree of 10 ranks and 6 draft tokens"):
        HeadsDrafter(heads, TREES["mc_sim_7b_63"])
    with pytest.raises(ConfigError, match="before `bind`"):
        HeadsDrafter(create_heads("medusa", {"num_heads": 1, "hidden_size": C}))
    with pytest.raises(ConfigError, match="least_mass 2"):
        Beam(least_mass=2)
    with pytest.raises(ConfigError, match="children 0"):
        Beam(children=0)


LEVELS = st.lists(
    st.lists(st.sampled_from([0.0, -0.0, 1e-6, -1.0, -1.0, -7.5, -torch.inf, torch.nan]), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(LEVELS, st.integers(1, 4), st.integers(1, 12), st.integers(1, 5))
def test_growth_keeps_a_tree_whatever_the_scores(
    levels: list[list[float]], frontier: int, max_nodes: int, max_depth: int
) -> None:
    """Equal, certain, impossible and undefined scores: what is kept is always connected, in a lawful order."""
    growth = Growth(2, frontier, torch.device("cpu"))
    for k, level in enumerate(levels):
        tokens = torch.arange(3) + 10 * k
        chosen = growth.add(torch.tensor([level, level[::-1]]), tokens.expand(2, 3))
        assert chosen.tokens.shape[1] <= frontier
    grown = growth.trees([5, 6], [max_nodes, 3], [max_depth, 1])  # TokenTree checks itself
    trees = [tree for tree, _ in grown]
    for tree, chances in grown:
        assert len(chances) == len(tree)
        assert list(chances) == sorted(chances, reverse=True)
        assert 0 <= chances[-1] <= chances[0] == 1
    assert [tree.tokens[0] for tree in trees] == [5, 6]
    width = 1
    available = 1
    for _ in levels[:max_depth]:
        available += width * 3
        width = min(frontier, width * 3)
    assert len(trees[0]) == min(max_nodes, available)
    assert max(trees[0].depths) <= max_depth
    assert len(trees[1]) == 3
    assert trees[1].depths == (0, 1, 1)

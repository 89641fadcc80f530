"""Typical acceptance: Medusa's rule, and no token that is not in the tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import reference_typical

from oval_core.speculation_config import SpeculationConfig
from oval_spec.token_tree import TokenTree
from oval_spec.typical import TypicalVerifier
from oval_spec.verify import create_verifier

V = 6
TREE = TokenTree((0, 1, 2, 3, 4, 0, 5), (-1, 0, 0, 1, 1, 2, 5))


def greedy(threshold: float, alpha: float) -> TypicalVerifier:
    return TypicalVerifier(
        threshold=threshold, alpha=alpha, choose=lambda scores: int(scores.argmax())
    )


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0.02, 0.6), st.floats(0.05, 1.0), st.floats(0.3, 6.0))
def test_accepts_what_the_rule_says(
    seed: int, threshold: float, alpha: float, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(len(TREE), V, generator=generator)
    result = greedy(threshold, alpha).accept(TREE, lambda node: scores[node])
    assert result.nodes == reference_typical(TREE, scores, threshold, alpha)
    assert result.next_token == int(scores[result.nodes[-1]].argmax())


def test_likely_tokens_pass_and_unlikely_ones_do_not() -> None:
    # p = .5 .3 .1 .06 .04: entropy 1.24, and 0.3 * exp(-H) = 0.087 is the lower bar.
    p = torch.tensor([0.04, 0.5, 0.1, 0.06, 0.3])
    for token, passes in ((1, True), (4, True), (2, True), (3, False), (0, False)):
        tree = TokenTree.chain([9, token])
        result = greedy(0.09, 0.3).accept(tree, lambda node: p.log())
        assert (len(result.nodes) == 2) == passes, token


def test_of_equally_long_paths_the_most_probable_counts() -> None:
    p = torch.tensor([0.1, 0.3, 0.6])
    tree = TokenTree((0, 1, 2), (-1, 0, 0))
    assert greedy(0.09, 0.3).accept(tree, lambda node: p.log()).nodes == (0, 2)


def test_certain_scores_make_it_greedy() -> None:
    scores = torch.full((len(TREE), V), -50.0)
    scores[torch.arange(len(TREE)), torch.tensor([2, 0, 0, 0, 0, 5, 1])] = 50.0
    result = greedy(0.09, 0.3).accept(TREE, lambda node: scores[node])
    assert result.nodes == (0, 2, 5, 6)
    assert result.next_token == 1


def test_padding_is_never_accepted() -> None:
    # The last node, whose scores padded paths borrow, is sure of token 0; so is the short leaf.
    tree = TokenTree((9, 7, 8, 5), (-1, 0, 0, 2))
    scores = 40 * torch.nn.functional.one_hot(torch.tensor([7, 0, 5, 0]), 10).float()
    result = greedy(0.09, 0.3).accept(tree, lambda node: scores[node])
    assert result.nodes == (0, 1)
    assert result.next_token == 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_next_token_is_sampled_only_where_asked(do_sample: bool) -> None:
    config = SpeculationConfig(verification="typical")
    verifier = create_verifier(config, do_sample, torch.Generator().manual_seed(0))
    scores = torch.tensor([0.0, 0.1, 0.0])
    root = TokenTree.chain([1])
    seen = {verifier.accept(root, lambda node: scores).next_token for _ in range(60)}
    assert seen == ({0, 1, 2} if do_sample else {1})

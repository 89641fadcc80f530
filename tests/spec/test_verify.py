"""Verification: greedy decoding keeps its tokens, sampling its distribution; the rule that does not is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import OneDrawAPath, padded_greedy_count

from oval_core.speculation_config import SpeculationConfig
from oval_spec import verify
from oval_spec.token_tree import TokenTree
from oval_spec.verifier import Verifier
from oval_spec.verify import GreedyVerifier, SamplingVerifier, create_verifier, draw

V = 5
DRAWS = 100_000
# Three children of the root, two below the first: several paths share a node.
FIRST = TokenTree((0, 1, 2, 3, 0, 2), (-1, 0, 0, 0, 1, 1))
SETTINGS = {
    "temperature 0.5": (0.5, None, None),
    "temperature 1": (1.0, None, None),
    "temperature 1.8": (1.8, None, None),
    "top-k 3": (1.0, 3, None),
    "top-p 0.7": (1.2, None, 0.7),
}


def processed(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Scores [..., V] as logits processors leave them."""
    scores = logits / temperature
    order = scores.argsort(-1, descending=True)
    if top_k is not None:
        scores = scores.scatter(-1, order[..., top_k:], float("-inf"))
    if top_p is not None:
        p = torch.softmax(scores, -1).gather(-1, order)
        out = p.cumsum(-1) - p >= top_p
        scores = scores.masked_fill(torch.zeros_like(out).scatter(-1, order, out), float("-inf"))
    return scores


class Target:
    """A model of three tokens' memory: scores by the tokens so far, drawn in advance, so that 1e5 draws are fast."""

    def __init__(self, setting: tuple[float, int | None, float | None]) -> None:
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(1 + V + V**2 + V**3, V, generator=generator)
        self.scores = list(processed(logits, *setting))
        self.p = torch.softmax(torch.stack(self.scores).double(), -1)
        self._place = {id(scores): i for i, scores in enumerate(self.scores)}
        self._drawn: dict[int, Iterator[int]] = {}

    def place(self, *path: int) -> int:
        """Which scores follow these tokens."""
        begin = (0, 1, 1 + V, 1 + V + V**2)[len(path)]
        return begin + sum(token * V**i for i, token in enumerate(reversed(path)))

    def draw(self, scores: torch.Tensor, generator: torch.Generator | None = None) -> int:
        """One draw from scores of this model, taken from many that were made together."""
        place = self._place[id(scores)]
        while (token := next(self._drawn.get(place, iter(())), None)) is None:
            many = torch.multinomial(torch.softmax(scores, -1), DRAWS // 4, replacement=True)
            self._drawn[place] = iter(many.tolist())
        return token

    def follow(self, tree: TokenTree, *before: int) -> Callable[[int], torch.Tensor]:
        """The scores of a tree's nodes after these tokens; the root stands for the last of them."""
        places = [
            self.place(*before, *(tree.tokens[n] for n in tree.path(node)[1:]))
            for node in range(len(tree))
        ]
        scores = [self.scores[place] for place in places]
        return lambda node: scores[node]


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a chi-square test; impossible outcomes must not occur, rare ones are counted together."""
    if bool(counts[expected == 0].any()):
        return 0.0
    rare = (expected > 0) & (expected < 5)
    kept = expected >= 5
    counts = torch.cat([counts[kept], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[kept], expected[rare].sum()[None]])
    square = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, square / 2))


def first_two_tokens(target: Target, verifier: Verifier, draws: int) -> tuple[float, float]:
    """p-values of the first token and of the first two together, from the steps that it takes to have two."""
    second = [TokenTree((a, 0, 3), (-1, 0, 0)) for a in range(V)]
    follow_first = target.follow(FIRST)
    follow_second = [target.follow(tree, a) for a, tree in enumerate(second)]
    counts = [0] * V**2
    for _ in range(draws):
        result = verifier.accept(FIRST, follow_first)
        if len(result.nodes) > 1:
            a = FIRST.tokens[result.nodes[1]]
            b = FIRST.tokens[result.nodes[2]] if len(result.nodes) > 2 else result.next_token
        else:
            a = result.next_token
            result = verifier.accept(second[a], follow_second[a])
            b = second[a].tokens[result.nodes[1]] if len(result.nodes) > 1 else result.next_token
        counts[a * V + b] += 1
    p_first = target.p[0]
    p_both = torch.cat([p_first[a] * target.p[target.place(a)] for a in range(V)])
    seen = torch.tensor(counts)
    return (
        p_value(seen.view(V, V).sum(1), p_first * draws),
        p_value(seen, p_both * draws),
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_has_the_targets_distribution(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(SETTINGS[setting])
    monkeypatch.setattr(verify, "draw", target.draw)
    first, both = first_two_tokens(target, SamplingVerifier(), DRAWS)
    assert first > 1e-4
    assert both > 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_draw_a_path_fails_the_same_test(setting: str) -> None:
    target = Target(SETTINGS[setting])
    first, both = first_two_tokens(target, OneDrawAPath(target.draw), DRAWS // 10)
    assert min(first, both) < 1e-12


def test_draws_follow_the_softmax_and_the_generator() -> None:
    scores = torch.tensor([0.3, float("-inf"), 1.0, -1.0])
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[draw(scores, None)] += 1
    assert p_value(counts, torch.softmax(scores.double(), 0) * 4000) > 1e-4
    runs = []
    for _ in range(2):
        verifier = create_verifier(SpeculationConfig(), True, torch.Generator().manual_seed(5))
        # An accept may end after one draw or go on: the sequence of results tells generators apart.
        many = [verifier.accept(FIRST, lambda node: torch.zeros(V)) for _ in range(20)]
        runs.append(many)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Trees of up to 10 nodes over few tokens, so that the target often agrees."""
    tokens, parents = [0], [-1]
    for _ in range(draw(st.integers(0, 9))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, V - 1))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


@settings(deadline=None, derandomize=True)
@given(trees(), st.integers(0, 10**6))
def test_greedy_goes_where_greedy_decoding_goes(tree: TokenTree, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers, so that there are ties.
    scores = torch.randint(0, 3, (len(tree), V), generator=generator).float()
    asked: list[int] = []

    def scores_of(node: int) -> torch.Tensor:
        asked.append(node)
        return scores[node]

    result = GreedyVerifier().accept(tree, scores_of)
    text = [tree.tokens[node] for node in result.nodes[1:]] + [result.next_token]
    node, expected = 0, []
    while True:
        expected.append(int(scores[node].argmax()))
        below = [n for n in range(len(tree)) if tree.parents[n] == node]
        node = next((n for n in below if tree.tokens[n] == expected[-1]), -1)
        if node < 0:
            break
    assert text == expected
    assert tuple(asked) == result.nodes, (
        "a node's scores are asked for once, and only along the path"
    )
    assert result.nodes == tree.path(result.nodes[-1])


def test_token_0_after_a_short_leaf_is_not_counted() -> None:
    # The target says 0 after the leaf 7, as it does after the last node: padded paths count that as accepted.
    tree = TokenTree((9, 7, 8, 5), (-1, 0, 0, 2))
    argmax = [7, 0, 5, 0]
    scores = torch.nn.functional.one_hot(torch.tensor(argmax), 10).float()
    result = GreedyVerifier().accept(tree, lambda node: scores[node])
    assert result.nodes == (0, 1)
    assert result.next_token == 0
    assert padded_greedy_count(tree, argmax) == 2, "the padded rule counts one too many"


def test_settings_choose_the_verifier() -> None:
    exact = SpeculationConfig()
    assert create_verifier(exact, False).name == "greedy"
    assert create_verifier(exact, True).name == "sampling"
    assert create_verifier(exact, True).is_lossless
    typical = SpeculationConfig(verification="typical", typical_threshold=0.2)
    for do_sample in (False, True):
        assert create_verifier(typical, do_sample).name == "typical"
        assert not create_verifier(typical, do_sample).is_lossless

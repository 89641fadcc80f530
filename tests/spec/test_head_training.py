"""Training of draft heads: what is learnt from, the loss, the measures, and a loop that goes on exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_spec.heads import IGNORED, DraftVocabulary, create_heads
from oval_spec.heads.base import DraftHeads
from oval_spec.heads.facts import BaseWeights
from oval_spec.training.accuracy import MISSED, accuracy_table, rank_of, simulated_tau
from oval_spec.training.batches import Batches, DraftHead
from oval_spec.training.config import HeadTrainingConfig
from oval_spec.training.examples import (
    CONTEXT,
    HeadExamples,
    frequent_tokens,
    split_by_prompt,
)
from oval_spec.training.loop import HeadTrainer, TrainedHeads, TrainingStopped
from oval_spec.training.loss import TILE, draft_loss, soft_targets
from oval_spec.training.measure import all_ranks, measure, tau_of_kinds
from oval_spec.tree_shape import TreeShape

VOCAB, HIDDEN = 40, 16
SETTINGS = {
    "sequential": {"num_heads": 3, "hidden_size": HIDDEN, "mlp_size": 32},
    "medusa": {"num_heads": 3, "hidden_size": HIDDEN},
}
QUIET: dict[str, Any] = {"soft_tokens": 0, "tick": lambda label, done, total: None}


def _base() -> BaseWeights:
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    return BaseWeights(weight, weight)


def _examples(count: int = 12, length: int = 9) -> HeadExamples:
    """Answers where each token follows from the one before, and the hidden state says which comes."""
    draw = torch.Generator().manual_seed(3)
    prompts, tokens, hidden = [], [], []
    for number in range(count):
        first = int(torch.randint(VOCAB, (), generator=draw))
        said = [first]
        for _ in range(length + number % 3):
            said.append((3 * said[-1] + 1) % VOCAB)
        prompts.append(torch.tensor(said[:1], dtype=torch.int32))
        tokens.append(torch.tensor(said[1:], dtype=torch.int32))
        hidden.append(_base().lm_head_weight[said[1:]])
    return HeadExamples.join(prompts, tokens, hidden, ["a", "b"] * (count // 2))


def _heads(kind: str = "sequential", vocabulary: DraftVocabulary | None = None) -> DraftHeads:
    torch.manual_seed(0)
    heads = create_heads(kind, SETTINGS[kind], vocabulary)
    heads.bind(_base().embed_weight, _base().lm_head_weight)
    return heads


def _trainer(folder: Path, stop_at: int | None = None, **config: Any) -> HeadTrainer:
    done: list[int] = []
    logged: list[int] = []
    values = {"epochs": 4, "batch_size": 16, "validate_every": 7, "save_every": 5}
    return HeadTrainer(
        _heads(),
        _base(),
        _examples(),
        _examples(4),
        HeadTrainingConfig(**{**values, "precision": "float32", **config}),
        folder=folder,
        identity={"a": 1},
        tick=lambda label, i, total: done.append(i) if label == "training" else None,
        log=lambda curve: logged.append(len(curve)),
        is_stopping=lambda: stop_at is not None and done[-1] == stop_at,
    )


def test_each_head_predicts_one_token_further() -> None:
    prompts = [torch.tensor([7, 8]), torch.arange(20, 30)]
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    own = HeadExamples.join(prompts, tokens, [torch.zeros(3, 2), torch.ones(2, 2)], ["a", "b"])
    rows = torch.arange(5)
    assert own.places(rows, 2).tolist() == [[1, 2], [2, -1], [-1, -1], [4, -1], [-1, -1]]
    assert own.paths(rows, 0, 2).tolist() == [[1, 2], [2, 3], [3, -1], [4, 5], [5, -1]]
    before = own.paths(rows, 3, 1)[:, :3].tolist()
    assert before == [[-1, 7, 8], [7, 8, 1], [8, 1, 2], [27, 28, 29], [28, 29, 4]]
    assert own.paths(rows[3:], CONTEXT, 1)[0].tolist() == [*range(22, 30), 4]
    assert own.firsts().tolist() == [0, 3]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), min_size=2, max_size=30),
    st.floats(0.05, 0.9),
)
def test_equal_prompts_stay_on_one_side(drawn: list[tuple[int, str]], share: float) -> None:
    prompts = [[number, ord(kind)] for number, kind in drawn]
    kinds = [kind for _, kind in drawn]
    train, held_out = split_by_prompt(prompts, kinds, share, 0)
    assert sorted(train + held_out) == list(range(len(drawn)))
    assert not {tuple(prompts[i]) for i in train} & {tuple(prompts[i]) for i in held_out}
    for kind in set(kinds):
        several = len({tuple(p) for p, own in zip(prompts, kinds, strict=True) if own == kind}) > 1
        assert several == any(kinds[i] == kind for i in held_out)
        assert any(kinds[i] == kind for i in train)


def test_the_draft_vocabulary_is_what_was_said_most_and_fills_up_from_below() -> None:
    said = torch.tensor([9, 9, 9, 5, 5, 7])
    assert frequent_tokens(said, 2, 12)[0].tolist() == [5, 9]
    ids, unseen = frequent_tokens(said, 5, 12)
    assert (ids.tolist(), unseen) == ([0, 1, 5, 7, 9], 2)
    read = torch.tensor([11, 8, 8, 9, 7])
    assert frequent_tokens(said, 4, 12, read)[0].tolist() == [5, 7, 8, 9]
    ids, unseen = frequent_tokens(said, 6, 12, read)
    assert (ids.tolist(), unseen) == ([0, 5, 7, 8, 9, 11], 1)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_tiled_loss_is_cross_entropy(is_soft: bool, has_bias: bool) -> None:
    rows = TILE + 3
    states = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN)
    bias = torch.randn(VOCAB) if has_bias else None
    targets, scale = torch.randint(VOCAB, (rows,)), torch.rand(rows)
    ids = torch.stack([torch.randperm(VOCAB)[:4] for _ in range(rows)])
    shares = torch.rand(rows, 4).softmax(1)
    got = draft_loss(states, weight, bias, targets, scale, (ids, shares) if is_soft else None)
    (2 * got).backward()
    gradient, states.grad = states.grad, None
    if is_soft:
        wanted = torch.zeros(rows, VOCAB).scatter(1, ids, shares)
    else:
        wanted = F.one_hot(targets, VOCAB).float()
    logits = F.linear(states, weight, bias)
    want = (scale * F.cross_entropy(logits, wanted, reduction="none")).sum()
    (2 * want).backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, states.grad)


def test_soft_targets_are_the_likeliest_tokens_with_their_shares() -> None:
    hidden, weight = torch.randn(TILE + 1, HIDDEN), torch.randn(VOCAB, HIDDEN)
    soft = soft_targets(hidden, weight, None, 3, QUIET["tick"])
    shares, ids = (hidden @ weight.T).softmax(1).topk(3)
    assert torch.equal(soft.ids.long(), ids)
    torch.testing.assert_close(
        soft.shares.float(), shares / shares.sum(1, keepdim=True), atol=1e-3, rtol=0
    )


def test_the_loss_skips_ends_and_tokens_that_are_not_drafted() -> None:
    examples = _examples()
    vocabulary = DraftVocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    heads = _heads(vocabulary=vocabulary)
    batches = Batches(heads, examples, DraftHead.of(heads, _base(), torch.float32), **QUIET)
    rows = torch.arange(0, len(examples), 3)
    states, targets = batches.states(rows), batches.targets(rows)
    want = torch.zeros(())
    for i, row in enumerate(rows.tolist()):
        for k in range(3):
            place = row + 1 + k
            inside = place < len(examples) and examples.answers[place] == examples.answers[row]
            token = int(examples.tokens[place]) if inside else 1
            assert int(targets[i, k]) == (token // 2 if token % 2 == 0 else IGNORED)
            if token % 2 == 0:
                logits = _base().lm_head_weight[::2] @ states[i, k]
                want = want + 0.8**k * (logits.logsumexp(0) - logits[token // 2])
    torch.testing.assert_close(batches.loss(rows, 0.8, 0.0), want / len(rows))
    assert batches.loss(rows, 0.8, 1.0) > want / len(rows)


@pytest.mark.parametrize("kind", ["medusa", "sequential"])
def test_states_see_the_path_and_no_further(kind: str) -> None:
    examples = _examples()
    heads = _heads(kind)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batches = Batches(heads, examples, DraftHead.of(heads, _base(), torch.float32), **QUIET)
    before = batches.states(torch.tensor([0]))[0]
    place = CONTEXT + 2
    examples.text[place] = (examples.text[place] + 1) % VOCAB  # two tokens after the root
    after = batches.states(torch.tensor([0]))[0]
    changed = (before != after).any(1).tolist()
    assert changed == [False, False, kind == "sequential"]


def test_ranks_and_accuracy_count_misses() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3], [0.1, 0.5, 0.3], [2.0, 2.0, 2.0]])
    assert rank_of(logits, torch.tensor([2, IGNORED, 0])).tolist() == [1, MISSED, 2]
    ranks = torch.tensor([[0, 1], [MISSED, 0], [2, 0], [0, 5]])
    counted = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    assert accuracy_table(ranks, counted, 3) == [[0.5, 0.0, 0.25], [0.5, 0.5, 0.0]]


def test_simulated_tau_walks_the_answer() -> None:
    shape = TreeShape.of([[0], [1], [0, 0]])
    # Answer of 5: the root's two drafts are right (3 tokens), then the second token of a head that has no child.
    ranks = torch.tensor([[0, 0], [9, 9], [9, 9], [1, 0], [9, 9], [9, 9], [0, 9]])
    assert simulated_tau(ranks[:5], [5], shape) == 5 / 2
    assert simulated_tau(ranks, [5, 2], shape) == 7 / 4
    assert simulated_tau(ranks, [5, 2], TreeShape(())) == 1.0


def test_heads_learn_a_language_and_are_measured_right(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, learning_rate=2e-2, epochs=20, validate_every=70)
    first = measure(trainer.held_out)
    trained = trainer.run()
    last = trained.curve[-1]
    assert last["updates"] == trainer.updates == 20 * (len(_examples()) // 16)
    assert last["top1"][0] > 0.7 > 0.2 > first.top1[0]
    assert [len(row) for row in last["accuracy"]] == [10] * 3
    assert last["top1"] == tuple(row[0] for row in last["accuracy"])
    assert first.tau["31"] < last["tau"]["31"] <= 4.0
    tau = tau_of_kinds(trainer.held_out, 32, QUIET["tick"])
    assert set(tau) == {"a", "b", "all"}
    assert tau["all"] >= last["tau"]["31"] - 0.4
    json.dumps(last)


def test_a_grown_tree_of_one_node_is_the_likeliest_token(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, learning_rate=2e-2, epochs=8)
    trainer.run()
    batches = trainer.held_out
    fixed = simulated_tau(
        all_ranks(batches)[0], batches.examples.lengths.tolist(), TreeShape.of([[0]])
    )
    assert 1.1 < fixed < 2.0  # neither always right nor never
    assert tau_of_kinds(batches, 2, QUIET["tick"])["all"] == pytest.approx(fixed)


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "a").run()
    with pytest.raises(TrainingStopped):
        _trainer(tmp_path / "b", stop_at=9).run()
    again = _trainer(tmp_path / "b").run()
    assert again.resumed_at == 9
    _assert_same(whole, again)
    done = _trainer(tmp_path / "b").run()  # nothing is left to do
    assert (done.resumed_at, done.positions_per_s) == (28, 0.0)
    _assert_same(whole, done)


def _assert_same(one: TrainedHeads, other: TrainedHeads) -> None:
    for (name, a), b in zip(
        one.heads.state_dict().items(), other.heads.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert one.curve == other.curve


def test_a_checkpoint_of_other_settings_is_not_gone_on_from(tmp_path: Path) -> None:
    _trainer(tmp_path).run()
    assert _trainer(tmp_path, decay=0.5).run().resumed_at == 0


def test_the_order_of_an_epoch_has_every_position_once(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, learning_rate=1e-9)
    seen = []
    for done in range(trainer.updates):
        trainer._done = done
        seen.append(trainer._rows())
    first, second = torch.cat(seen[:7]), torch.cat(seen[7:14])
    assert len(first.unique()) == len(first) == 7 * 16
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"epochs": 0}, "epochs"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"decay": 1.5}, "decay"),
        ({"soft_tokens": -1}, "soft_tokens"),
        ({"regression": -1.0}, "regression"),
        ({"precision": "float8"}, "precision"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: got"):
        HeadTrainingConfig(**wrong)

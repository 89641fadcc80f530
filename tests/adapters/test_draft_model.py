"""Drafts by another model: what it proposes follows the text, whatever was rejected before. Shapes: B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import tiny_models
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oval_adapters.attachment import attach
from oval_adapters.speculative.draft_model import DraftModelDrafter, check_tokenizers
from oval_core.errors import ConfigError
from oval_spec.drafter import DraftRequest

DEPTH = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


def requests(texts: dict[int, Sequence[int]], **changes: int) -> list[DraftRequest]:
    limits = {"max_depth": 100, "max_nodes": 100, **changes}
    return [DraftRequest(row=row, ids=ids, hidden=None, **limits) for row, ids in texts.items()]


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: Sequence[int], count: int) -> list[int]:
    """The greedy continuation without any cache."""
    text = list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@torch.no_grad()
def accepted(model: PreTrainedModel, ids: Sequence[int], path: Sequence[int]) -> list[int]:
    """What a greedy target emits after a chain of drafts: those that are right, and one more."""
    logits = model(torch.tensor([[*ids, *path]]), use_cache=False).logits[0]
    right = logits[len(ids) - 1 :].argmax(-1).tolist()
    kept = next((i for i, (a, b) in enumerate(zip(path, right, strict=False)) if a != b), len(path))
    return right[: kept + 1]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_target_as_its_own_draft_is_always_right(name: str) -> None:
    model = tiny_models.shared(name)
    drafter = DraftModelDrafter(model, DEPTH)
    texts = {row: tiny_models.prompt(n, seed=row)[0].tolist() for row, n in enumerate((19, 2))}
    for _ in range(2):
        drafts = drafter.draft(requests(texts))
        for row, draft in enumerate(drafts):
            right = greedy(model, texts[row], DEPTH + 1)
            assert list(draft.tree.tokens[1 : DEPTH + 1]) == right[:DEPTH]
            texts[row] = [*texts[row], *right]


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_text_is_the_targets_and_cache_is_right_after_rejections(name: str) -> None:
    target, other = tiny_models.shared(name), tiny_models.shared(name, 5)
    drafter = DraftModelDrafter(other, DEPTH)
    prompts = {row: tiny_models.prompt(n, seed=row)[0].tolist() for row, n in enumerate((3, 17, 9))}
    texts, rejected = dict(prompts), 0
    for step in range(6):
        if step == 4:
            del texts[1]  # a row that has ended
        drafts = drafter.draft(requests(texts))
        for (row, ids), draft in zip(texts.items(), drafts, strict=True):
            alone = DraftModelDrafter(other, DEPTH).draft(requests({0: ids}))[0]
            assert draft.tree == alone.tree
            torch.testing.assert_close(draft.states, alone.states, atol=1e-4, rtol=1e-4)
            path = draft.tree.tokens[1 : DEPTH + 1]
            # every third step one of its own tokens stands, so that prefixes of all lengths are kept
            emitted = accepted(target, ids, path) if step % 3 else [*path[: row + 1], 7]
            rejected += DEPTH - len(emitted) + 1
            texts[row] = [*ids, *emitted]
    assert rejected > 15, "nothing was rejected"


def test_every_emitted_token_is_the_targets() -> None:
    target, other = tiny_models.shared("llama"), tiny_models.shared("llama", 5)
    prompt = tiny_models.prompt(11)[0].tolist()
    drafter, text = DraftModelDrafter(other, DEPTH), list(prompt)
    while len(text) < 24:
        tree = drafter.draft(requests({0: text}))[0].tree
        text += accepted(target, text, tree.tokens[1 : DEPTH + 1])
    assert text == prompt + greedy(target, prompt, len(text) - len(prompt))


def test_states_are_the_models_last_hidden_states() -> None:
    model = tiny_models.shared("llama")
    ids = tiny_models.prompt(9)[0].tolist()
    draft = DraftModelDrafter(model, DEPTH).draft(requests({0: ids}))[0]
    with torch.no_grad():
        text = torch.tensor([[*ids, *draft.tree.tokens[1:DEPTH]]])
        hidden = model.base_model(text).last_hidden_state[0, -DEPTH:]
    torch.testing.assert_close(draft.states, hidden, atol=1e-5, rtol=1e-5)


def test_second_branch_takes_a_node_that_is_left() -> None:
    model = tiny_models.shared("llama")
    ids = tiny_models.prompt(9)[0].tolist()
    with torch.no_grad():
        second = int(model(torch.tensor([ids])).logits[0, -1].topk(2).indices[1])
    tree = DraftModelDrafter(model, DEPTH).draft(requests({0: ids}, max_nodes=DEPTH + 2))[0].tree
    assert tree.parents == (-1, 0, 1, 2, 3, 0)
    assert tree.tokens[-1] == second
    tree = DraftModelDrafter(model, DEPTH).draft(requests({0: ids}, max_nodes=DEPTH + 1))[0].tree
    assert tree.is_chain
    assert len(tree) == DEPTH + 1


def test_limits_of_a_request_hold() -> None:
    model = tiny_models.shared("llama")
    ids = tiny_models.prompt(9)[0].tolist()
    drafter = DraftModelDrafter(model, DEPTH)
    assert len(drafter.draft(requests({0: ids}, max_depth=0))[0].tree) == 1
    assert drafter.draft(requests({0: ids}, max_depth=2))[0].tree.depths == (0, 1, 2, 1)
    assert len(drafter.draft(requests({0: ids}, max_nodes=2))[0].tree) == 2
    drafts = drafter.draft([*requests({0: ids}, max_depth=1), *requests({1: ids}, max_depth=3)])
    assert [max(draft.tree.depths) for draft in drafts] == [1, 3]
    assert [len(draft.states) for draft in drafts] == [1, 3]


def test_a_text_beyond_its_positions_gets_no_draft() -> None:
    model = tiny_models.build("llama", max_position_embeddings=12)
    drafter = DraftModelDrafter(model, DEPTH)
    ids = tiny_models.prompt(11)[0].tolist()
    assert max(drafter.draft(requests({0: ids}))[0].tree.depths) == 2
    assert len(drafter.draft(requests({0: [*ids, 5, 6]}))[0].tree) == 1


def test_padding_of_its_vocabulary_is_never_proposed() -> None:
    model = tiny_models.shared("llama")
    ids = tiny_models.prompt(9)[0].tolist()
    drafts = DraftModelDrafter(model, DEPTH, vocab_size=9).draft(requests({0: ids}))
    assert max(drafts[0].tree.tokens[1:]) < 9


def test_drafts_while_attached_as_the_target() -> None:
    model = tiny_models.build("llama")
    ids = tiny_models.prompt(9)[0].tolist()
    plain = DraftModelDrafter(model, DEPTH).draft(requests({0: ids}))[0]
    with attach(model):
        assert DraftModelDrafter(model, DEPTH).draft(requests({0: ids}))[0].tree == plain.tree


def tokenizer(words: Sequence[str], **special: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<u>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<u>", **special)


def test_other_tokenizers_are_refused_with_the_difference() -> None:
    ours = tokenizer(["<u>", "<e>", "reads", "pages"], eos_token="<e>")
    check_tokenizers(ours, tokenizer(["<u>", "<e>", "reads", "pages"], eos_token="<e>"), "same")
    for words, special, told in [
        (["<u>", "<e>", "reads"], {"eos_token": "<e>"}, "3 tokens against 4"),
        (["<u>", "<e>", "pages", "reads"], {"eos_token": "<e>"}, "token 'reads' is 3 against 2"),
        (["<u>", "<e>", "reads", "pages"], {}, "eos_token_id is None against 1"),
    ]:
        with pytest.raises(ConfigError, match=told):
            check_tokenizers(ours, tokenizer(words, **special), "other")


def test_a_tokenizer_that_splits_otherwise_is_refused() -> None:
    ours = tokenizer(["<u>", "<e>", "reads", "pages"])
    theirs = tokenizer(["<u>", "<e>", "reads", "pages"])
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    with pytest.raises(ConfigError, match="a probe text gives"):
        check_tokenizers(ours, theirs, "other")


def test_a_row_without_positions_left_does_not_stop_the_others() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=tiny_models.VOCAB, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    drafter = DraftModelDrafter(model, DEPTH)
    long, last, short = (tiny_models.prompt(n, seed=n)[0].tolist() for n in (20, 15, 6))
    drafts = drafter.draft(requests({0: long, 1: last, 2: short}))
    assert [draft.tree.is_chain for draft in drafts] == [True, False, False]
    assert len(drafts[0].tree) == 1
    assert drafts[1].tree.tokens[1:3] == tuple(greedy(model, last, 2))
    assert drafts[2].tree.tokens[1 : DEPTH + 1] == tuple(greedy(model, short, DEPTH))

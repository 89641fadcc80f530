"""Held forwards of token trees: each node's logits are Hugging Face's for its path, and what is accepted is a plain text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_tree import RandomTree, accepted_paths
from tiny_models import BACKENDS, TINY, one_thread, padded, prompt, shared
from tiny_routers import ALL, TIERS, routed

from oval_adapters import attach
from oval_adapters.attachment import Attachment
from oval_adapters.hf_cache import OvalCache

_one_thread = pytest.fixture(autouse=True)(one_thread)


class HeldText:
    """A batch with left padding that grows by accepted paths; every node's logits are checked on the way."""

    def __init__(self, name: str, oval: Attachment, lengths: list[int], seed: int = 1) -> None:
        self.model, self.oval, self.rng = shared(name), oval, random.Random(seed)
        self.inputs = padded(lengths, seed)
        mask = self.inputs["attention_mask"]
        self.texts = [
            ids[own.bool()].tolist()
            for ids, own in zip(self.inputs["input_ids"], mask, strict=True)
        ]
        self.cache = oval.new_cache()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.model(**self.inputs, position_ids=positions, cache=self.cache)

    @property
    def counts(self) -> list[int]:
        return [seq.length for seq in self.cache.paged.table.sequences]

    def hold(self, trees: list[RandomTree], spare: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the held forward; returns ids [B, T] and logits [B, T, V]."""
        width = max(len(tree) for tree in trees) + spare
        ids, positions = prompt(width, len(trees), self.rng.randrange(1 << 20)), []
        for tree, text in zip(trees, self.texts, strict=True):
            depths = [len(tree.path(node)) - 1 for node in range(len(tree))]
            places = [len(text) + depth for depth in depths]
            positions.append(places + [0] * (width - len(tree)))
        self.cache.hold([tree.seen() if len(tree) else 0 for tree in trees])
        got = self.model(ids, position_ids=torch.tensor(positions), cache=self.cache)
        return ids, got.logits

    def step(self, most: int = 7) -> None:
        sizes = [self.rng.choice([0, 1, self.rng.randint(2, most)]) for _ in self.texts]
        sizes[self.rng.randrange(len(sizes))] = self.rng.randint(2, most)
        trees = [RandomTree(size, self.rng) for size in sizes]
        ids, logits = self.hold(trees, self.rng.choice([0, 1]))
        self.check(trees, ids, logits)
        accepted = accepted_paths(trees, self.rng)
        self.cache.accept(accepted)
        for row, places in enumerate(accepted):
            self.texts[row] += ids[row, places].tolist()
        assert self.counts == [len(text) for text in self.texts]

    def check(self, trees: list[RandomTree], ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Leaves alone: their paths hold every node."""
        for row, tree in enumerate(trees):
            for node in set(range(len(tree))) - set(tree.parents):
                path = tree.path(node)
                text = torch.tensor([[*self.texts[row], *ids[row, path].tolist()]])
                want = self.model(text, use_cache=False).logits[0, -len(path) :]
                assert (logits[row, path] - want).abs().max() <= 1e-4

    def go_on(self) -> None:
        """An ordinary turn of two tokens, then one: masks of the padded grid."""
        columns = self.cache.get_seq_length()
        mask = torch.zeros(len(self.texts), columns, dtype=torch.long)
        for row in range(len(self.texts)):
            places = self.cache._columns.places(row)
            mask[row, slice(None) if places is None else places] = 1
        for count in (2, 1):
            ids = prompt(count, len(self.texts), self.rng.randrange(1 << 20))
            mask = torch.cat([mask, mask.new_ones(len(self.texts), count)], 1)
            at = torch.tensor(self.counts)[:, None] + torch.arange(count)
            got = self.model(ids, attention_mask=mask, position_ids=at, cache=self.cache).logits
            for row, text in enumerate(self.texts):
                text += ids[row].tolist()
                want = self.model(torch.tensor([text]), use_cache=False).logits[0, -count:]
                assert (got[row] - want).abs().max() <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_each_node_has_the_logits_of_its_path(name: str, backend: str) -> None:
    with attach(shared(name), {"backend": backend, "page_size": 4}) as oval:
        text = HeldText(name, oval, [9, 21, 14])
        for _ in range(3):
            text.step()
        if TINY[name].window is None:  # Hugging Face's windows count the padding between turns
            text.go_on()
            text.step()


SETTINGS: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1},
    "pages of 32": {"page_size": 32},
    "hidden states": {"track_hidden": True},
    "routed, all": routed(token_budget=ALL),
    "routed, all, cut": routed(token_budget=ALL, sizing="key_similarity"),
    "guarded, all": routed("guarded", coverage=1.0),
    "tiers": {"page_size": 4, "tiers": TIERS},
    "routed tiers": routed(tiers=TIERS, token_budget=ALL),
    "guarded tiers": routed("guarded", tiers=TIERS, coverage=1.0),
}


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_policies_and_tiers_that_read_everything(name: str) -> None:
    with attach(shared("llama"), SETTINGS[name]) as oval:
        text = HeldText("llama", oval, [12, 19], seed=2)
        for _ in range(3):
            text.step(6)
        text.go_on()
        text.step(6)


@torch.no_grad()
def test_columns_after_ragged_accepts() -> None:
    """Columns of a row go on behind its last stored one, and every other call on the cache follows."""
    with attach(shared("llama"), {"page_size": 4}) as oval:
        text = HeldText("llama", oval, [3, 5])
        trees = [RandomTree(4, text.rng), RandomTree(3, text.rng)]
        trees[0].parents, trees[1].parents = [-1, 0, 0, 1], [-1, 0, 1]
        ids, _ = text.hold(trees)
        assert text.cache.get_seq_length() == 5, "it does not count yet"
        text.cache.accept([[0, 1, 3], [0]])
        assert text.cache.get_seq_length() == 8
        stored = [text.cache._columns.places(row).tolist() for row in range(2)]
        assert stored == [[2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]]
        keys = text.cache.to_dynamic_cache().layers[0].keys
        assert keys.shape[2] == 8
        assert keys[1, :, 6:].abs().sum() == 0
        text.texts = [text.texts[0] + ids[0, [0, 1, 3]].tolist(), text.texts[1] + [int(ids[1, 0])]]
        text.cache.crop(-2)
        assert text.counts == [4, 6]
        text.cache.reorder_cache(torch.tensor([1, 0]))
        assert text.counts == [6, 4]
        text.texts = [text.texts[1], text.texts[0][:4]]
        text.go_on()
        text.step()


@torch.no_grad()
def test_chains_and_equal_accepts_need_no_padding() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache, ids = oval.new_cache(), prompt(12, 2)
        model(ids[:, :6], cache=cache)
        cache.hold([4, 4])
        model(ids[:, 6:10], cache=cache)
        cache.accept([[0, 1], [0, 1]])
        assert not cache._columns.has_padding
        got = model(ids[:, 8:], cache=cache).logits
    assert (got - model(ids).logits[:, 8:]).abs().max() <= 1e-4


@torch.no_grad()
def test_last_hidden_states_are_those_of_the_model() -> None:
    model, ids = shared("llama"), prompt(9, 2)
    want = model.model(ids).last_hidden_state
    for settings in ({}, {"tiers": TIERS, "page_size": 4}):
        with attach(model, settings) as oval:
            cache = oval.new_cache()
            cache.keeps_hidden = True
            model(ids, cache=cache)
            assert isinstance(cache, OvalCache)
            torch.testing.assert_close(cache.last_hidden, want, atol=1e-4, rtol=1e-4)
            cache.hold([2, 0])
            model(ids[:, :2], cache=cache)
            assert cache.last_hidden.shape == (2, 2, want.shape[2])
            cache.abort()


@torch.no_grad()
def test_an_aborted_held_forward_never_was() -> None:
    with attach(shared("llama"), routed(token_budget=ALL)) as oval:
        text = HeldText("llama", oval, [12, 19])
        before = [list(page.tokens) for page in text.cache.paged.table.pages()]
        text.hold([RandomTree(6, text.rng), RandomTree(1, text.rng)])
        text.cache.abort()
        assert [list(page.tokens) for page in text.cache.paged.table.pages()] == before
        assert text.cache.get_seq_length() == 19
        text.go_on()
        text.step()


@torch.no_grad()
def test_drafts_on_the_cache_are_dropped_with_their_columns() -> None:
    from oval_core.policy import FullPolicy

    with attach(shared("llama"), {"page_size": 4}) as oval:
        text = HeldText("llama", oval, [6, 9])
        with text.cache.drafting(FullPolicy()):
            text.cache.hold([3, 1])
            text.model(prompt(3, 2), cache=text.cache)
            text.cache.accept([[0, 1, 2], [0]])
            assert text.cache.get_seq_length() == 12
        assert text.cache.get_seq_length() == 9
        assert text.counts == [6, 9]
        text.step()
        text.go_on()

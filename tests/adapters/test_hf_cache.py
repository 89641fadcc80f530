"""`OvalCache` answers like a `DynamicCache` with the same tokens, and takes no more memory than it holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import TINY, one_thread, padded, prompt, run, shared
from transformers import DynamicCache

from oval_adapters import OvalCache, attach, decoder_run
from oval_adapters.hf_cache_api import HfCacheApi
from oval_core.errors import OvalError

_one_thread = pytest.fixture(autouse=True)(one_thread)

QUESTIONS = {
    "length": lambda c: c.get_seq_length(),
    "length of a layer": lambda c: c.layers[1].get_seq_length(),
    "offset": lambda c: c.get_query_offset(),
    "mask sizes": lambda c: c.get_mask_sizes(3, 0),
    "mask sizes of a layer": lambda c: c.layers[0].get_mask_sizes(3),
    "layers": len,
    "initialized": lambda c: c.is_initialized,
    "layer initialized": lambda c: [layer.is_initialized for layer in c.layers],
    "compileable": lambda c: c.is_compileable,
    "croppable": lambda c: c.is_croppable,
    "linear": lambda c: c.is_linear,
    "sliding": lambda c: c.is_sliding,
    "dummy": lambda c: c.is_dummy,
    "max length": lambda c: c.get_max_length(),
    "max length of a layer": lambda c: c.get_max_length(0),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_it_answers_like_a_dynamic_cache(question: str, batch: int) -> None:
    model, ask = shared("llama"), QUESTIONS[question]
    theirs = DynamicCache(config=model.config)
    with attach(model) as oval:
        ours = oval.new_cache()
        empty = (ask(ours), ask(theirs))
        for part in prompt(14, batch).split([9, 4, 1], 1):
            model(part, cache=theirs)
            model(part, cache=ours)
        assert ask(ours) == ask(theirs)
    assert empty[0] == empty[1]


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if tiny.window is None])
@torch.no_grad()
def test_layers_show_the_keys_and_values_of_hugging_face(name: str) -> None:
    model, inputs = shared(name), padded([15, 6])
    real = inputs["attention_mask"].bool()
    theirs = model(**inputs, use_cache=True).cache
    with attach(model) as oval:
        ours = oval.new_cache()
        model(**inputs, cache=ours)
        for got, want in zip(ours.layers, theirs.layers, strict=True):
            for a, b in ((got.keys, want.keys), (got.values, want.values)):
                assert a.shape == b.shape
                a, b = a.transpose(1, 2), b.transpose(1, 2)
                assert (a[real] - b[real]).abs().max() < 1e-5
                assert not a[~real].any()


@torch.no_grad()
def test_an_empty_cache_shows_nothing_and_can_be_passed_on() -> None:
    model, ids = shared("llama"), prompt(9)
    with attach(model) as oval:
        cache = oval.new_cache()
        assert cache.layers[0].keys is None
        assert cache.to_dynamic_cache().get_seq_length() == 0
        twin = copy.deepcopy(cache)
        model(ids, cache=twin)
        assert (cache.get_seq_length(), twin.get_seq_length()) == (0, 9)
        cache.reset()
        cache.crop(0)


@torch.no_grad()
def test_a_cache_cropped_to_nothing_can_be_read_and_filled() -> None:
    model, ids = shared("llama"), prompt(9, 2)
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids, cache=cache)
        cache.crop(-9)
        assert cache.get_seq_length() == 0
        assert cache.layers[0].keys is None or cache.layers[0].keys.shape[2] == 0
        assert cache.to_dynamic_cache().get_seq_length() == 0
        assert (model(ids, cache=cache).logits - model(ids).logits).abs().max() < 1e-4


@torch.no_grad()
def test_a_row_of_nothing_but_padding_can_be_read() -> None:
    model, inputs = shared("llama"), padded([8, 3])
    inputs["attention_mask"][1] = 0
    want = model(inputs["input_ids"][:1]).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        assert (model(**inputs, cache=cache).logits[:1] - want).abs().max() < 1e-4
        assert not cache.layers[0].keys[1].any()
        assert cache.to_dynamic_cache().get_seq_length() == 8


ROWS: dict[str, tuple[Any, list[int]]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select by mask": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("change", ROWS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_rows_change_like_those_of_a_dynamic_cache(name: str, change: str) -> None:
    model, inputs = shared(name), padded([17, 6, 11])
    act, rows = ROWS[change]
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    mask = torch.cat([inputs["attention_mask"][rows], torch.ones(len(rows), 4).long()], 1)
    steps = prompt(4, len(rows), seed=6)

    def step(cache: Any) -> torch.Tensor:
        cache = model(**inputs, position_ids=positions, cache=cache, use_cache=True).cache
        act(cache)
        parts = []
        for end in (3, 4):
            start = 0 if end == 3 else 3
            seen = mask[:, : 17 + end]
            place = (seen.cumsum(-1) - 1)[:, 17 + start :]
            part = steps[:, start:end]
            out = model(part, attention_mask=seen, position_ids=place, cache=cache)
            parts.append(out.logits)
        return torch.cat(parts, 1)

    want = step(None)
    with attach(model) as oval:
        cache = oval.new_cache()
        assert (step(cache) - want).abs().max() < 1e-4
        cache.paged.table.check_integrity()


@pytest.mark.parametrize("remove", [1, 3, -10])
@torch.no_grad()
def test_crop_takes_minus_what_is_there(remove: int) -> None:
    model, ids = shared("llama"), prompt(9)
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids, cache=cache)
        keys = cache.layers[0].keys
        with pytest.raises(OvalError, match="crop"):
            cache.crop(remove)
        assert torch.equal(cache.layers[0].keys, keys)
        cache.crop(0)
        assert torch.equal(cache.layers[0].keys, keys)


@torch.no_grad()
def test_reset_serves_another_batch_in_the_same_memory() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache = oval.new_cache(reserve_tokens=64)
        model(**padded([20, 11, 7]), cache=cache)
        cache.reset()
        assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
        ids = prompt(30, 2)
        assert (model(ids, cache=cache).logits - model(ids).logits).abs().max() < 1e-4
        assert oval.counters.pool_growths == 1


BYTES_PER_TOKEN = 2 * 3 * 2 * 12 * 4
"""Keys and values, 3 layers, 2 KV heads of 12, float32."""


@pytest.mark.parametrize(("length", "new"), [(200, 56), (301, 40), (400, 100)])
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_generate_takes_the_memory_of_its_tokens(length: int, new: int, page_size: int) -> None:
    model = shared("llama")
    with attach(model, {"page_size": page_size}) as oval:
        cache = run(model, prompt(length), max_new_tokens=new).cache
        stats = oval.stats()
    exact = (length + new) * BYTES_PER_TOKEN
    one_page = page_size * BYTES_PER_TOKEN  # the last page is rounded up, and one more is spare
    assert isinstance(cache, OvalCache)
    assert cache.paged.bytes_allocated == stats["peak_bytes"]
    assert exact - BYTES_PER_TOKEN <= stats["peak_bytes"] <= exact * 1.05 + 2 * one_page
    assert stats["pool_growths"] == 1
    assert stats["slots_copied"] == 0


def test_a_default_page_keeps_memory_within_five_per_cent() -> None:
    model = shared("llama")
    with attach(model) as oval:
        run(model, prompt(500), max_new_tokens=100)
        assert oval.stats()["peak_bytes"] <= 1.05 * 600 * BYTES_PER_TOKEN


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}])
def test_a_batch_takes_the_memory_of_its_longest_rows(way: dict[str, Any]) -> None:
    model = shared("llama")
    with attach(model) as oval:
        run(model, **padded([200, 190]), max_new_tokens=30, **way)
        stats = oval.stats()
    rows = 2 * way.get("num_beams", 1)
    assert stats["peak_bytes"] <= rows * (230 + 32) * BYTES_PER_TOKEN * 1.05
    assert stats["pool_growths"] == 1


@torch.no_grad()
def test_direct_forwards_grow_by_an_eighth_not_each_step() -> None:
    model, ids = shared("llama"), prompt(300)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        parts = [model(part, cache=cache).logits for part in ids.split([40] + [1] * 260, 1)]
        assert oval.counters.pool_growths < 25
        assert oval.counters.slots_copied < 10 * 300
    assert (torch.cat(parts, 1) - want).abs().max() < 1e-4


def test_stats_say_what_ran() -> None:
    model = shared("llama")
    with attach(model, {"backend": "sdpa", "page_size": 8}) as oval:
        run(model, prompt(9), max_new_tokens=4)
        stats = oval.stats()
    assert (stats["backend"], stats["page_size"], stats["policy"]) == ("sdpa", 8, "full")
    assert (stats["forwards"], stats["tokens_written"]) == (4, 12)
    assert stats["tokens_dropped"] == 0


@torch.no_grad()
def test_an_interrupt_between_plan_and_layers_is_taken_back() -> None:
    model, ids = shared("llama"), prompt(20)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids[:, :13], cache=cache)
        cache.begin(oval, None, 1, 5, ids.device)  # and Ctrl-C before the first layer
        assert (model(ids[:, 13:], cache=cache).logits - want[:, 13:]).abs().max() < 1e-4
        cache.paged.table.check_integrity()


@torch.no_grad()
def test_an_interrupt_while_planning_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model, ids = shared("llama"), prompt(20)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids[:, :13], cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr("oval_core.storage.build_plan", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 13:16], cache=cache)
        assert (model(ids[:, 13:], cache=cache).logits - want[:, 13:]).abs().max() < 1e-4
        cache.paged.table.check_integrity()


@pytest.mark.parametrize("cached", [0, 9])
@torch.no_grad()
def test_padding_of_a_forward_that_failed_is_forgotten(cached: int) -> None:
    model, ids = shared("llama"), prompt(20, 2)
    want = model(ids).logits[:, cached:]
    with attach(model) as oval:
        cache = oval.new_cache()
        if cached:
            model(ids[:, :cached], cache=cache)
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, cached : cached + 4] = 0
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, cached:], attention_mask=mask, cache=cache)
        hook.remove()
        got = [
            model(part, cache=cache).logits for part in ids[:, cached:].split([7, 13 - cached], 1)
        ]
        assert (torch.cat(got, 1) - want).abs().max() < 1e-4
        assert cache.layers[0].keys[1, :, cached].abs().sum() > 0


@torch.no_grad()
def test_it_says_which_columns_are_stored() -> None:
    model, told = shared("llama"), padded([5, 9])
    with attach(model) as oval:
        cache = oval.new_cache()
        model(prompt(6), cache=cache, use_cache=True)
        assert cache.stored_columns(0).tolist() == list(range(6))
        cache.reset()
        model(**told, cache=cache, use_cache=True)
        assert [cache.stored_columns(row).tolist() for row in (0, 1)] == [
            list(range(4, 9)),
            list(range(9)),
        ]
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.stored_columns(1).tolist() == list(range(4, 9))


def test_what_only_translates_is_no_cache_by_itself() -> None:
    with pytest.raises(TypeError, match="abstract method '?_select"):
        HfCacheApi(layers=[])


@torch.no_grad()
def test_position_ids_are_made_only_for_columns_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain forwards leave them to the decoder, token by token."""
    monkeypatch.setattr(decoder_run, "positions_of", None)
    model, told = shared("llama"), padded([5, 9])
    with attach(model) as oval:
        got = run(model, **told, max_new_tokens=4)
    assert got.sequences.tolist() == run(model, **told, max_new_tokens=4).sequences.tolist()
    assert oval.stats()["forwards"] > 0

"""Prefill routing over turns: what was left unread is read later as if in its turn, and nothing is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from prefill_world import LAYOUT, N, config, inputs, masked
from reference_prefill import NEVER, greedy_slowly, read_times, visible
from tiny_models import assert_same_run, one_thread, prompt, run
from tiny_towers import tower_model

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)


def turn_two(first: Any, seed: int = 8) -> torch.Tensor:
    return torch.cat([first.sequences, prompt(6, seed=seed)], 1)


@pytest.mark.parametrize("settings", [config(0.4), config(0.4, tiers={"fast_tokens": 96})])
def test_a_second_turn_reads_what_it_wants(settings: dict[str, Any]) -> None:
    model, told = tower_model("clip"), inputs([LAYOUT])
    pixels, width = told["pixel_values"], told["input_ids"].shape[1]
    with attach(model, settings) as oval:
        first = run(model, **told, max_new_tokens=5)
        before = first.cache.unread_columns(0, 0, width)
        start = first.cache.get_seq_length()
        ids = turn_two(first)
        second = run(model, ids, cache=first.cache, max_new_tokens=8)
        after = first.cache.unread_columns(0, 0, width)
        moved = (before & ~after).nonzero()[:, 0].tolist()
        assert oval.stats()["vision"]["image_tokens_materialised"] == len(moved) > 0
        assert not bool((after & ~before).any())
        turns = [0, start]
        times = read_times(first.cache, 0, turns)
    late = dict.fromkeys(moved, 1)
    want = greedy_slowly(model, ids, pixels, lambda w: visible(times[:width], turns, late, w), 8)
    assert second.sequences[0, -8:].tolist() == want
    # and it is not what the first turn's pages alone would say
    plain = [NEVER if bool(before[c]) else 0 for c in range(width)]
    logits = second.logits[0][0]
    bias = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    bias.masked_fill_(~visible(plain, turns, {}, ids.shape[1]), float("-inf"))
    with torch.no_grad():
        other = model(input_ids=ids, pixel_values=pixels, attention_mask=bias).logits[0, -1]
    assert (logits - other).abs().max() > 1e-2


def test_all_of_it_can_be_read_and_is_then_as_dense() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT, [2, 3]])
    width = told["input_ids"].shape[1]
    with attach(model, config(0.3)) as oval:
        cache = oval.new_cache()
        with torch.no_grad():
            model(**told, cache=cache)
        left = sum(int(cache.unread_columns(row, 0, width).sum()) for row in range(2))
        assert oval.read_images(cache) == left > 0
        assert oval.read_images(cache) == 0
        assert cache.lengths == told["attention_mask"].sum(1).tolist()
        assert cache.get_seq_length() == width
        cache.paged.table.check_integrity()
        held = [sum(image.span.length for image in row) for row in cache.images]
        assert held == [2 * N, N]
        assert oval.stats()["vision"]["image_tokens_materialised"] == left
        grid = cache.grid(0)
    with attach(model, {"page_size": 4}) as oval:
        dense = oval.new_cache()
        with torch.no_grad():
            model(**told, cache=dense)
        want = dense.grid(0)
    # keys and values of the first layer depend on token and position alone: all are there, each in its column
    for ours, theirs in zip(grid, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_crop_gives_back_what_was_read_later() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT])
    width = told["input_ids"].shape[1]
    with attach(model, config(0.4)) as oval:
        first = run(model, **told, max_new_tokens=5)
        cache = first.cache
        kept, start = cache.grid(1), cache.get_seq_length()
        before = cache.unread_columns(0, 0, width)
        run(model, turn_two(first), cache=cache, max_new_tokens=4)
        after = cache.unread_columns(0, 0, width)
        assert not torch.equal(before, after)
        cache.crop(start - cache.get_seq_length())  # what turn 2 read stays: its pages are there
        assert torch.equal(cache.unread_columns(0, 0, width), after)
        cache.crop(-1)  # into turn 1: the pages came after, and go
        assert torch.equal(cache.unread_columns(0, 0, width), before)
        cache.paged.table.check_integrity()
        for ours, theirs in zip(cache.grid(1), kept, strict=True):
            torch.testing.assert_close(ours, theirs[:, :, :-1])
        assert oval.read_images(cache) == int(before.sum())  # nothing is lost
        cache.crop(10 - cache.get_seq_length())
        assert oval.read_images(cache) == 0
        cache.reset()
        assert oval.read_images(cache) == 0


def test_copies_and_rows_go_their_own_way() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT, [2, 3]])
    width = told["input_ids"].shape[1]
    with attach(model, config(0.4)) as oval:
        cache = oval.new_cache()
        with torch.no_grad():
            model(**told, cache=cache)
        twin = copy.deepcopy(cache)
        left = [int(cache.unread_columns(row, 0, width).sum()) for row in range(2)]
        assert oval.read_images(twin) == sum(left)
        assert [int(cache.unread_columns(row, 0, width).sum()) for row in range(2)] == left
        cache.batch_select_indices(torch.tensor([1, 1, 0]))
        assert oval.read_images(cache) == 2 * left[1] + left[0]
        twin.batch_select_indices(torch.tensor([1, 1, 0]))
        for ours, theirs in zip(cache.grid(2), twin.grid(2), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_failed_forward_leaves_no_trace() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT])
    with attach(model, config(0.4)) as oval, torch.no_grad():
        cache = oval.new_cache()
        model(**told, cache=cache)
        unread, length = cache.unread_columns(0, 0, 63), cache.get_seq_length()
        layer = model.model.language_model.layers[1]

        def fail(*_: object) -> None:
            raise RuntimeError("out of order")

        hook = layer.register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="out of order"):
                oval.read_images(cache)
            with pytest.raises(RuntimeError, match="out of order"):
                model(input_ids=prompt(4), cache=cache)
        finally:
            hook.remove()
        assert torch.equal(cache.unread_columns(0, 0, 63), unread)
        assert cache.get_seq_length() == length
        assert oval.read_images(cache) == int(unread.sum())


@pytest.mark.parametrize("drafter", ["ngram", "self", "none"])
def test_speculation_after_a_routed_prompt(drafter: str) -> None:
    model, told = tower_model("clip"), inputs([LAYOUT, [2, 3]])
    settings = config(0.4, speculation={"drafter": drafter})
    with attach(model, settings) as oval:
        want = run(model, **told, max_new_tokens=20)
        got = run(model, **told, max_new_tokens=20, custom_generate=oval.speculative)
        assert_same_run(got, want)
        again = torch.cat([got.sequences, prompt(6, batch=2, seed=8)], 1)
        plain = run(model, again, cache=want.cache, attention_mask=_mask(told, again))
        second = run(model, again, cache=got.cache, attention_mask=_mask(told, again), custom_generate=oval.speculative)  # fmt: skip
        assert_same_run(second, plain)


def _mask(told: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[:, : told["attention_mask"].shape[1]] = told["attention_mask"]
    return mask


def test_windows_count_all_columns() -> None:
    model = windowed()
    told = inputs([[3, 4, 6], [2, 3]])
    with attach(model, config(0.4)) as oval:
        got = run(model, **told)
        assert_same_run(got, run(model, **masked(told, got.cache), use_oval=False))
        oval.read_images(got.cache)
        assert got.cache.lengths == (told["attention_mask"].sum(1) + 11).tolist()


def test_windows_count_columns_of_what_was_read_later() -> None:
    model, told = windowed(), inputs([[3, 0, 2]])
    width = told["input_ids"].shape[1]
    with attach(model, config(0.4)) as oval:
        first = run(model, **told, max_new_tokens=3)
        before = first.cache.unread_columns(0, 0, width)
        start = first.cache.get_seq_length()
        assert oval.read_images(first.cache) == int(before.sum())
        ids = turn_two(first)
        second = run(model, ids, cache=first.cache, max_new_tokens=6)
    late = dict.fromkeys(before.nonzero()[:, 0].tolist(), 1)
    times = [0] * start

    def seen(total: int) -> torch.Tensor:
        far = torch.arange(total)[:, None] - torch.arange(total)
        return visible(times, [0, start], late, total) & (far < 12)

    want = greedy_slowly(model, ids, told["pixel_values"], seen, 6)
    assert second.sequences[0, -6:].tolist() == want


def windowed() -> Any:
    from tiny_towers import _COMMON, _TEXT, _VISION, _ready
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        MistralConfig,
    )

    torch.manual_seed(0)
    text = MistralConfig(**_TEXT, tie_word_embeddings=False, sliding_window=12)
    vision = CLIPVisionConfig(**_VISION, intermediate_size=32)
    return _ready(LlavaForConditionalGeneration._from_config(LlavaConfig(vision_config=vision, text_config=text, **_COMMON)))  # fmt: skip

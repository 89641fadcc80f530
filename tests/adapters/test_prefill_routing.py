"""Prefill routing: what is left unread is as if masked, what is read later is as if read in its turn, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_world import LAYOUT, N, config, inputs, masked
from tiny_models import assert_same_run, build, one_thread, run
from tiny_towers import TOKENS, images, parts_model, rows_of, tower_model

from oval_adapters import attach
from oval_core.errors import ConfigError

_one_thread = pytest.fixture(autouse=True)(one_thread)

BUDGETED = {
    "one": ([LAYOUT], config()),
    "three images, no text between": ([[2, 0, 0, 5]], config(0.3)),
    "batch with padding and a row of text": ([[3, 4, 6], [9], [1, 2]], config()),
    "nothing of the images": ([LAYOUT, [5, 3]], config(0.0)),
    "no page in any case": ([LAYOUT], config(0.2, vision={"pages_per_image": 0})),
    "tokens": ([LAYOUT], {"vision": {"tile": 2, "budget_tokens": 9, "router": "uniform"}}),
    "norm": ([LAYOUT], config(router="feature-norm")),
    "means": ([LAYOUT], config(router="key-mean")),
    "routed": ([LAYOUT], config(policy="routed", routing={"token_budget": 640})),
    "tiers": ([LAYOUT, [2, 3]], config(tiers={"fast_tokens": 96})),
    "tiers, pieces of nothing": ([LAYOUT], config(0.0, tiers={"fast_tokens": 48})),
    "torch": ([LAYOUT], config(backend="torch")),
    "sdpa": ([[2, 5], [3, 3]], config(backend="sdpa")),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budgeted_prompt_is_as_if_the_rest_were_masked(name: str) -> None:
    layouts, settings = BUDGETED[name]
    model, told = tower_model("clip"), inputs(layouts)
    with attach(model, settings) as oval:
        got = run(model, **told)
        stats = oval.stats()["vision"]
        width = told["input_ids"].shape[1]
        left = sum(int(got.cache.unread_columns(row, 0, width).sum()) for row in range(len(layouts)))  # fmt: skip
    num_images = sum(len(own) - 1 for own in layouts)
    assert stats["image_tokens_seen"] == N * num_images
    assert stats["image_tokens_read"] == N * num_images - left
    assert left > 0
    assert_same_run(got, run(model, **masked(told, got.cache)))
    # HF counts all columns, pages hold what was read
    assert got.cache.get_seq_length() == width + 11
    lengths = (told["attention_mask"].sum(1) + 11).tolist()
    assert sum(lengths) - sum(got.cache.lengths) == left


@pytest.mark.parametrize("budget", [1.0, 1])
def test_a_whole_budget_is_the_same_bit_for_bit(budget: float) -> None:
    model, told = tower_model("clip"), inputs([LAYOUT, [2, 3]])
    with attach(model, {"page_size": 4, "vision": {"tile": 2}}):
        want = run(model, **told)
    with attach(model, config(budget)) as oval:
        got = run(model, **told)
        assert oval.stats()["vision"]["image_tokens_read"] == 3 * N
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_the_decoder_runs_on_fewer_columns() -> None:
    model, told, seen = build_widths()
    with attach(model, config(0.3)):
        run(model, **told, max_new_tokens=2)
    width = told["input_ids"].shape[1]
    assert seen[0] <= width - int(0.7 * 2 * N)
    assert seen[1:] == [1]


def build_widths() -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """A model that notes how many columns its first decoder layer gets."""
    from tiny_towers import build_tower

    model, seen = build_tower("clip"), []
    layer = model.model.language_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return model, inputs([LAYOUT]), seen


def test_budgets_are_kept_by_row() -> None:
    model, told = tower_model("clip"), inputs([[2, 3, 4, 5], [6], [2, 3]])
    with attach(model, config(0.5)):
        cache = run(model, **told).cache
        for row, count in enumerate([3, 0, 1]):
            held = sum(image.span.length for image in cache.images[row])
            assert held <= count * N // 2
            assert held > count * N // 2 - 4  # no whole page fits any more


def test_hidden_states_come_back_in_their_columns() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT, [2, 3]])
    with attach(model, config()) as oval, torch.no_grad():
        cache = oval.new_cache()
        got = model(**told, cache=cache, output_hidden_states=True)
        width = told["input_ids"].shape[1]
        unread = torch.stack([cache.unread_columns(row, 0, width) for row in range(2)])
    with torch.no_grad():
        want = model(**masked(told, cache), output_hidden_states=True)
    assert got.logits.shape == want.logits.shape
    read = told["attention_mask"].bool() & ~unread
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(ours[read], theirs[read], atol=1e-4, rtol=1e-4)
        assert bool((ours[~read] == 0).all())


def test_a_prompt_that_ends_with_an_image_reads_its_end() -> None:
    model, told = tower_model("clip"), inputs([[3, 0]])
    with attach(model, config(0.0)):
        got = run(model, **told)
        unread = got.cache.unread_columns(0, 0, 28)
    assert not bool(unread[-1])
    assert int(unread.sum()) == N - 1  # tile 2 leaves a page of one token in the corner
    assert_same_run(got, run(model, **masked(told, got.cache)))


def test_beams_and_chunks() -> None:
    model, told = tower_model("clip"), inputs([LAYOUT])
    with attach(model, config(0.4)):
        got = run(model, **told, num_beams=3)
        cache = run(model, **told).cache
        want = run(model, **masked(told, cache), num_beams=3, use_oval=False)
        assert got.sequences.tolist() == want.sequences.tolist()
        chunked = run(model, **told, prefill_chunk_size=8)  # images in pieces are read whole
    assert_same_run(chunked, run(model, **told))


def test_a_class_token_and_newlines_are_pages_too() -> None:
    model, tokens = tower_model("clip-full"), TOKENS["clip-full"]
    told = {**rows_of([[3, 5]], tokens), "pixel_values": images(1)}
    with attach(model, config(0.4)) as oval:
        got = run(model, **told)
        assert oval.stats()["vision"]["image_tokens_seen"] == tokens
        assert 0 < oval.stats()["vision"]["image_tokens_read"] <= 0.4 * tokens
        assert_same_run(got, run(model, **masked(told, got.cache), use_oval=False))


def test_settings_are_checked() -> None:
    model = tower_model("clip")
    wrong = [
        ({"budget": 1.5}, "share from 0 to 1"),
        ({"budget": 0.5, "budget_tokens": 3}, "one of them"),
        ({"budget": 0.5, "router": "unifrom"}, "uniform"),
        ({"budget": 0.5, "router": "clip"}, "vision.clip"),
        ({"budget": 0.5, "router": "./nothing"}, "cannot be read"),
        ({"pages_per_image": -1}, "whole number"),
    ]
    for vision, words in wrong:
        with pytest.raises(ConfigError, match=words):
            attach(model, {"vision": vision})
    with attach(build("llama")) as oval:
        assert oval.image_routing is None
        assert oval.read_images(oval.new_cache()) == 0


def test_next_is_routed_by_its_parts() -> None:
    model = parts_model("next")
    sizes = torch.tensor([[40, 40]])
    pixels = torch.randn(1, 3, 3, 40, 40, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        features = model.get_image_features(pixel_values=pixels, image_sizes=sizes)
    count = len(features.pooler_output[0])
    told = {**rows_of([[3, 5]], count), "pixel_values": pixels, "image_sizes": sizes}
    with attach(model, config(0.3)) as oval:
        got = run(model, **told)
        stats = oval.stats()["vision"]
        assert 0 < stats["image_tokens_read"] <= 0.3 * stats["image_tokens_seen"]
        assert_same_run(got, run(model, **masked(told, got.cache), use_oval=False))

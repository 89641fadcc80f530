"""`generate` with most of its pages in a slow tier gives the tokens and logits of plain Hugging Face."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_scenarios import CORE, MORE, check
from tiny_models import (
    TINY,
    assert_same_run,
    build,
    one_thread,
    padded,
    pictures,
    prompt,
    put_image,
    run,
    shared,
)

from oval_adapters import attach
from oval_core.errors import CacheMismatchError, ConfigError, FastMemoryError

_one_thread = pytest.fixture(autouse=True)(one_thread)

SMALL = {"fast_tokens": 64, "sink_tokens": 2, "recent_tokens": 4}
"""With pages of 2 the pool has 42 slots: less than one of the longer texts."""


def tiered(**tiers: Any) -> dict[str, Any]:
    return {"page_size": 2, "tiers": {**SMALL, **tiers}}


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def worker_names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("oval")]


@pytest.mark.parametrize("scenario", CORE)
@pytest.mark.parametrize("name", TINY)
def test_every_family_equals_hugging_face(name: str, scenario: str) -> None:
    stats = check(name, scenario, tiered())
    assert stats["tiers"]["bytes_stored"] > 0 or scenario == "crosses-window"


@pytest.mark.parametrize("scenario", MORE)
def test_every_way_to_generate_equals_hugging_face(scenario: str) -> None:
    check("llama", scenario, tiered())


@pytest.mark.parametrize("prefetch", ["oracle", "layer", "recent", "none"])
@pytest.mark.parametrize("where", ["host", "disk", "both", "direct"])
@pytest.mark.parametrize("scenario", ["padded-batch", "beams-padded"])
def test_every_place_and_order_equals_hugging_face(
    scenario: str, where: str, prefetch: str, tmp_path: Path
) -> None:
    places: dict[str, dict[str, Any]] = {
        "host": {},
        "disk": {"disk": str(tmp_path)},
        "both": {"disk": str(tmp_path), "host_tokens": 20},
        "direct": {"disk": str(tmp_path), "direct_io": True},
    }
    stats = check("qwen3", scenario, tiered(prefetch=prefetch, **places[where]))["tiers"]
    assert stats["bytes_used"] + stats["bytes_wasted"] == stats["bytes_prefetched"]
    assert (stats["bytes_used"] > 0) == (prefetch != "none")
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["reference", "sdpa", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3-window"])
def test_every_backend_equals_hugging_face(name: str, backend: str) -> None:
    check(name, "padded-batch", {**tiered(), "backend": backend})


@pytest.mark.parametrize("dense", [[0], [0, 1], [2]])
def test_dense_layers_stay_whole(dense: list[int]) -> None:
    stats = check("llama", "padded-batch", tiered(dense_layers=dense, fast_tokens=80))
    assert stats["tiers"]["bytes_stored"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_a_long_forward_runs_in_pieces(name: str) -> None:
    model, batch = shared(name), padded([150, 90, 131])
    with torch.no_grad():
        want = model(**batch, output_hidden_states=True)
        with attach(model, tiered()) as oval:
            cache = oval.new_cache()
            got = model(**batch, cache=cache, use_cache=True, output_hidden_states=True)
            assert oval.counters.forwards > 5
    torch.testing.assert_close(got.logits[:, -60:], want.logits[:, -60:], atol=1e-4, rtol=1e-4)
    assert len(got.hidden_states) == len(want.hidden_states)
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(ours[:, -60:], theirs[:, -60:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_decoder_in_pieces_gives_tuples_as_hugging_face_does() -> None:
    decoder, ids = shared("llama").model, prompt(150)
    asked = {"return_dict": False, "output_hidden_states": True}
    want = decoder(ids, **asked)
    with attach(shared("llama"), tiered()) as oval:
        got = decoder(ids, cache=oval.new_cache(), **asked)
    assert len(got) == len(want)
    torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_forward_in_pieces_that_fails_is_taken_back_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = build("llama"), prompt(120)
    with torch.no_grad(), attach(model, tiered()) as oval:
        cache = oval.new_cache()
        model(ids[:, :50], cache=cache, use_cache=True)
        calls = iter(range(100))

        def fail(*_: Any) -> None:
            if next(calls) == 2:
                raise KeyboardInterrupt

        layer = model.model.layers[1]
        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 50:], cache=cache, use_cache=True)
        handle.remove()
        assert cache.get_seq_length() == 50
        got = model(ids[:, 50:], cache=cache, use_cache=True).logits[:, -1]
    torch.testing.assert_close(got, model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_llava_with_its_image_in_a_slow_tier() -> None:
    model = shared("llava")
    ids = prompt(90)
    put_image(ids, 0, 3)
    inputs = {"input_ids": ids, "pixel_values": pictures(1), "max_new_tokens": 30}
    want = run(model, **inputs)
    with attach(model, tiered()) as oval:
        assert_same_run(run(model, **inputs), want)
        assert oval.stats()["tiers"]["bytes_used"] > 0


def test_later_turns_copies_and_the_way_back() -> None:
    model = shared("llama")
    plain = run(model, prompt(60))
    more = torch.cat([plain.sequences, prompt(21, seed=3)], 1)
    want = run(model, more, cache=copy.deepcopy(plain.cache))
    with attach(model, tiered()) as oval:
        first = run(model, prompt(60))
        twin = copy.deepcopy(first.cache)
        dynamic = first.cache.to_dynamic_cache()
        for cache in (first.cache, twin):
            assert_same_run(run(model, more, cache=cache), want)
        twin.crop(-61)
        assert oval.stats()["tiers"]["bytes_loaded"] > 0
    assert_same_run(run(model, more, cache=dynamic), want)
    assert first.cache.to_dynamic_cache().get_seq_length() == more.shape[1] + 11, "after detach"


def test_a_closed_cache_says_so() -> None:
    model = shared("llama")
    with torch.no_grad(), attach(model, tiered()) as oval:
        cache = oval.new_cache()
        model(prompt(100), cache=cache, use_cache=True)
        cache.close()
        cache.close()
        with pytest.raises(CacheMismatchError, match="was closed"):
            model(prompt(5), cache=cache, use_cache=True)
        with pytest.raises(CacheMismatchError, match="was closed"):
            cache.to_dynamic_cache()


def test_caches_end_with_generate_or_with_their_last_holder(tmp_path: Path) -> None:
    model = shared("llama")
    config = tiered(disk=str(tmp_path))
    gc.disable()  # by reference counts alone
    try:
        with attach(model, config):
            model.generate(prompt(90), max_new_tokens=5)
            assert worker_names() == [] == list(tmp_path.iterdir())
            result = run(model, prompt(90))
            assert len(worker_names()) == len(list(tmp_path.iterdir())) == 1
            kept = run(model, prompt(90))
            del result
            assert len(worker_names()) == len(list(tmp_path.iterdir())) == 1
        assert worker_names() == [], "detach ends the worker of a cache that is still held"
        assert kept.cache.layers[0].keys.shape[2] == 101
        del kept
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_thousand_cycles_leave_nothing(tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=2)
    ids = prompt(60)

    def cycle(tiers: dict[str, Any]) -> None:
        with attach(model, tiered(**tiers)) as oval:
            model.generate(ids, max_new_tokens=1)
            assert oval.counters.tiers.bytes_stored > 0

    for number in range(1000):
        cycle({"disk": str(tmp_path)} if number % 2 else {})
        if number == 20:
            gc.collect()
            descriptors = num_descriptors()
    gc.collect()
    assert num_descriptors() == descriptors
    assert worker_names() == [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tiers": {"fast_tokens": 20}}, "fast_tokens: got 20. Allowed with 3 tiered layers"),
        ({"tiers": {"fast_token": 64}}, "'tiers.fast_token': did you mean 'fast_tokens'"),
        ({"tiers": {"dense_layers": [3]}}, r"dense_layers: got \[3\]. Allowed: some of 0..2"),
        ({"tiers": {"dense_layers": [0, 1, 2]}}, "not all"),
        ({"tiers": {"disk": "/proc/none"}}, "no file can be written"),
        ({"tiers": 5}, "tiers: got 5"),
    ],
)
def test_bad_tiers_are_refused_by_attach(config: dict[str, Any], message: str) -> None:
    model = shared("llama")
    with pytest.raises(ConfigError, match=message):
        attach(model, config)
    attach(model).detach()


def test_more_rows_than_fast_memory_takes_are_refused_and_nothing_is_lost() -> None:
    model = shared("llama")
    with torch.no_grad(), attach(model, {"tiers": {"fast_tokens": 100}}) as oval:
        with pytest.raises(FastMemoryError, match="fewer rows, or raise tiers.fast_tokens"):
            model.generate(prompt(20, batch=9), max_new_tokens=3)
        got = model.generate(prompt(20, batch=2), max_new_tokens=30)
        assert oval.stats()["tiers"]["bytes_stored"] > 0
    assert torch.equal(got, model.generate(prompt(20, batch=2), max_new_tokens=30))

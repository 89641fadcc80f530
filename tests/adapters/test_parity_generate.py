"""`generate` on OVAL gives the tokens and logits of plain Hugging Face: every family, every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate_scenarios import CORE, LENGTHS, MANY_EOS, MORE, check, plain
from tiny_models import (
    BACKENDS,
    EOS,
    TINY,
    VOCAB,
    WINDOW,
    assert_same_run,
    build,
    one_thread,
    padded,
    prompt,
    run,
    shared,
)

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", CORE)
@pytest.mark.parametrize("name", TINY)
def test_every_backend_equals_hugging_face(name: str, scenario: str, backend: str) -> None:
    check(name, scenario, {"backend": backend})


@pytest.mark.parametrize("scenario", MORE)
@pytest.mark.parametrize("name", TINY)
def test_every_way_to_generate_equals_hugging_face(name: str, scenario: str) -> None:
    check(name, scenario, {"backend": "torch"})


@pytest.mark.parametrize("page_size", [1, 5, 32])
@pytest.mark.parametrize("scenario", ["padded-batch", "beams-padded", "lookup"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_every_page_size_equals_hugging_face(name: str, scenario: str, page_size: int) -> None:
    check(name, scenario, {"page_size": page_size})


@pytest.mark.parametrize("settings", [{"reserve_tokens": 1}, {"track_hidden": True}])
@pytest.mark.parametrize("scenario", ["padded-batch", "chunked-padded", "beams-padded"])
def test_other_settings_equal_hugging_face(scenario: str, settings: dict[str, Any]) -> None:
    check("gemma3", scenario, settings)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [15, 16, 17, 511, 530])
def test_prompts_around_pages_and_parts_of_the_kernel_equal_hugging_face(
    length: int, threads: int
) -> None:
    torch.set_num_threads(threads)  # with 3 threads, 2 KV heads make the kernel cut the keys
    model = shared("llama")
    want = run(model, prompt(length), max_new_tokens=6)
    with attach(model, {"backend": "torch"}):
        assert_same_run(run(model, prompt(length), max_new_tokens=6), want)


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_models_make_real_text(name: str) -> None:
    sequences = plain(name, "beyond-window").sequences[0, 3 * WINDOW :]
    assert len(set(sequences.tolist())) >= 5, "degenerate text hides wrong attention"


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_models_look_at_early_tokens(name: str) -> None:
    model, ids = shared(name), prompt(10)
    changed = ids.clone()
    changed[0, 1] = (changed[0, 1] + 40) % VOCAB
    with torch.no_grad():
        apart = (model(ids).logits - model(changed).logits)[0, -1].abs().max()
    assert apart > 0.1


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if tiny.window])
def test_the_window_of_the_tiny_models_binds(name: str) -> None:
    ids = prompt(3 * WINDOW)
    with torch.no_grad():
        wide = build(name, sliding_window=200)(ids).logits
        assert (shared(name)(ids).logits - wide)[0, -1].abs().max() > 0.1


def test_rows_end_at_different_steps() -> None:
    sequences = plain("llama", "uneven-ends").sequences
    ends = {(row[max(LENGTHS) :] == 0).sum().item() for row in sequences}
    assert len(ends) > 1
    assert EOS not in MANY_EOS


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_second_generate_on_the_same_attach_is_the_first_again(name: str) -> None:
    model = shared(name)
    with attach(model) as oval:
        first = run(model, **padded(LENGTHS))
        forwards = oval.counters.forwards
        second = run(model, **padded(LENGTHS))
        assert oval.counters.forwards == 2 * forwards
    assert torch.equal(first.sequences, second.sequences)
    assert all(torch.equal(a, b) for a, b in zip(first.logits, second.logits, strict=True))


class Collect:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then each new token."""
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Takes note of the end."""
        self.ended += 1


@pytest.mark.parametrize("extra", [{}, {"prompt_lookup_num_tokens": 3}, {"eos_token_id": MANY_EOS}])
def test_a_streamer_gets_every_token_in_order(extra: dict[str, Any]) -> None:
    model, ids = shared("llama"), prompt(20)
    streamer = Collect()
    with attach(model):
        result = run(model, ids, streamer=streamer, **extra)
    assert streamer.tokens == result.sequences[0].tolist()
    assert streamer.ended == 1
    assert result.sequences.tolist() == run(model, ids, **extra).sequences.tolist()


def test_custom_generate_gets_an_oval_cache() -> None:
    model = shared("llama")
    seen = []

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> str:
        seen.append(kwargs["cache"])
        return "made by the loop"

    with attach(model) as oval:
        assert model.generate(prompt(5), custom_generate=loop) == "made by the loop"
        assert oval.owns(seen[0])


def test_padding_on_the_right_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with attach(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
        assert "padding on the right" not in caplog.text
        mask[1, 4:] = 0
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert "padding on the right" in caplog.text

"""Direct forwards with an OVAL cache: 2-D and ready 4-D masks, positions, cropping, odd chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import BACKENDS, TINY, WINDOW, one_thread, padded, prompt, shared
from transformers import PreTrainedModel

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)


def tree_mask(batch: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    """A random bool mask: causal, each token sees itself, and about half of what came before."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(batch, heads, queries, keys, generator=generator) < 0.5
    last = torch.arange(keys - queries, keys)[:, None]
    places = torch.arange(keys)
    return (mask & (places < last)) | (places == last)


def as_bool(mask: torch.Tensor) -> torch.Tensor:
    """The mask as it is."""
    return mask


def as_float(mask: torch.Tensor) -> torch.Tensor:
    """The mask as Hugging Face makes it for `eager`."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    """A mask that also favours some keys, as ALiBi does."""
    return torch.where(mask, torch.linspace(-1, 1, mask.shape[-1]), float("-inf"))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Checks logits."""
    assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("chunks", [[30], [1, 29], [16, 1, 13], [7, 7, 7, 9], [29, 1]])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_prompt_in_any_chunks_gives_all_logits(
    name: str, backend: str, chunks: list[int]
) -> None:
    model, ids = shared(name), prompt(30, 2)
    want = model(ids).logits
    with attach(model, {"backend": backend}) as oval:
        cache = oval.new_cache()
        got = [model(part, cache=cache).logits for part in ids.split(chunks, 1)]
    close(torch.cat(got, 1), want)


def in_two(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: object, first: int
) -> torch.Tensor:
    """Logits of a prompt in two forwards; 2-D masks grow with the cache."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {"position_ids": positions[:, :first], "attention_mask": mask[:, :first]}
    head = model(ids[:, :first], cache=cache, use_cache=True, **kwargs)
    kwargs = {"position_ids": positions[:, first:], "attention_mask": mask}
    tail = model(ids[:, first:], cache=head.cache, **kwargs)
    return torch.cat([head.logits, tail.logits], 1)


@pytest.mark.parametrize("first", [4, 15])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_masks_and_positions_of_a_padded_batch(name: str, backend: str, first: int) -> None:
    model, inputs = shared(name), padded([21, 8, 14])
    want = in_two(model, inputs, None, first)
    with attach(model, {"backend": backend}) as oval:
        got = in_two(model, inputs, oval.new_cache(), first)
    real = inputs["attention_mask"].bool()
    close(got[real], want[real])


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_padding_on_the_right_of_a_prompt(backend: str) -> None:
    model, ids = shared("llama"), prompt(12, 2)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    step, longer = prompt(1, 2, seed=4), torch.cat([mask, mask.new_ones(2, 1)], 1)
    positions = mask.sum(1, keepdim=True)
    plain = model(ids, attention_mask=mask, use_cache=True)
    want = model(step, attention_mask=longer, position_ids=positions, cache=plain.cache).logits
    with attach(model, {"backend": backend}) as oval:
        cache = oval.new_cache()
        model(ids, attention_mask=mask, cache=cache)
        got = model(step, attention_mask=longer, position_ids=positions, cache=cache).logits
    close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_mask_may_hide_cached_tokens_for_one_forward(backend: str) -> None:
    model, ids, step = shared("llama"), prompt(12), prompt(3, seed=4)
    mask = torch.ones(1, 15, dtype=torch.long)
    mask[0, 2:6] = 0
    positions = torch.arange(12, 15)[None]

    def two_steps(cache: object) -> torch.Tensor:
        first = model(ids, cache=cache, use_cache=True)
        part = model(step, attention_mask=mask, position_ids=positions, cache=first.cache).logits
        return torch.cat([part, model(step, cache=first.cache).logits], 1)

    want = two_steps(None)
    with attach(model, {"backend": backend}) as oval:
        close(two_steps(oval.new_cache()), want)


@pytest.mark.parametrize("form", [as_bool, as_float, as_bias])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4), (1, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_ready_masks(
    backend: str, shape: tuple[int, int], form: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, ids, more = shared("llama"), prompt(18, 2), prompt(5, 2, seed=6)
    masks = [form(tree_mask(*shape, 18, 18)), form(tree_mask(*shape, 5, 23))]

    def two_steps(cache: object) -> torch.Tensor:
        first = model(ids, attention_mask=masks[0], cache=cache, use_cache=True)
        second = model(more, attention_mask=masks[1], cache=first.cache)
        third = model(more[:, :1], cache=second.cache)
        return torch.cat([first.logits, second.logits, third.logits], 1)

    want = two_steps(None)
    with attach(model, {"backend": backend}) as oval:
        close(two_steps(oval.new_cache()), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_ready_mask_rules_every_layer_of_every_family(name: str, backend: str) -> None:
    model, ids = shared(name), prompt(2 * WINDOW)
    mask = as_float(tree_mask(1, 1, 2 * WINDOW, 2 * WINDOW))
    want = model(ids, attention_mask=mask).logits
    with attach(model, {"backend": backend}) as oval:
        close(model(ids, attention_mask=mask, cache=oval.new_cache()).logits, want)


@pytest.mark.parametrize("removed", [1, 5, 17, 30])
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_cropping_is_as_if_the_tokens_had_never_come(name: str, removed: int) -> None:
    model, ids, more = shared(name), prompt(30, 2), prompt(6, 2, seed=6)
    want = model(torch.cat([ids[:, : 30 - removed], more], 1)).logits[:, -6:]
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids, cache=cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 30 - removed
        close(model(more, cache=cache).logits, want)


@torch.no_grad()
def test_cropping_into_and_through_padding() -> None:
    model, inputs = shared("llama"), padded([12, 4])
    step, full = prompt(3, 2, seed=6), torch.ones(2, 3, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"][:, :10], full], 1)
    ids = torch.cat([inputs["input_ids"][:, :10], step], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    want = model(ids, attention_mask=mask, position_ids=positions).logits[:, -3:]
    with attach(model) as oval:
        cache = oval.new_cache()
        first = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        model(**inputs, position_ids=first, cache=cache)
        cache.crop(-2)
        got = model(step, attention_mask=mask, position_ids=positions[:, -3:], cache=cache).logits
        cache.crop(-13)  # no row holds a token any more
        again = model(step, cache=cache).logits
    close(got, want)
    close(again, model(step).logits)


@torch.no_grad()
def test_positional_arguments_reach_the_decoder() -> None:
    model, ids = shared("llama"), prompt(12)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        states = model.get_decoder()(ids, None, None, cache)[0]
        assert cache.get_seq_length() == 12
        close(model.lm_head(states), want)


@torch.no_grad()
def test_the_old_name_of_the_cache_argument() -> None:
    model, ids = shared("llama"), prompt(12)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        with pytest.warns(FutureWarning, match="past_key_values"):
            got = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 12
    close(got, want)

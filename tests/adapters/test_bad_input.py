"""Every wrong call raises OVAL's own error, which says what to do, and leaves the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import build, one_thread, padded, prompt, run, shared
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPTNeoXConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from oval_adapters import Attachment, OvalCache, attach
from oval_core import OVALRouter, PageManager
from oval_core.errors import (
    CacheMismatchError,
    ConfigError,
    OvalError,
    PromptTooLongError,
    UnsupportedModelError,
)

_one_thread = pytest.fixture(autouse=True)(one_thread)

Call = Callable[[PreTrainedModel, OvalCache], Any]


def wrong_old_padding(model: PreTrainedModel, cache: OvalCache) -> None:
    """Says that a token was real which was padding when it was cached."""
    model(prompt(1, 2), attention_mask=torch.ones(2, 13, dtype=torch.long), cache=cache)


WRONG_FORWARDS: dict[str, tuple[Call, type[OvalError], str]] = {
    "batch too large": (
        lambda m, c: m(prompt(1, 3), cache=c),
        CacheMismatchError,
        "batch size: got 3.*Allowed: 2",
    ),
    "batch too small": (
        lambda m, c: m(prompt(1, 1), cache=c),
        CacheMismatchError,
        "batch size: got 1.*Allowed: 2",
    ),
    "mask of the new tokens only": (
        lambda m, c: m(prompt(1, 2), attention_mask=torch.ones(2, 1), cache=c),
        CacheMismatchError,
        r"attention_mask: got shape \(2, 1\).*\(2, 13\)",
    ),
    "mask of another batch": (
        lambda m, c: m(prompt(1, 2), attention_mask=torch.ones(1, 13), cache=c),
        CacheMismatchError,
        r"attention_mask: got shape \(1, 13\).*\(2, 13\)",
    ),
    "3-D mask": (
        lambda m, c: m(prompt(1, 2), attention_mask=torch.ones(2, 1, 13), cache=c),
        CacheMismatchError,
        "attention_mask",
    ),
    "padding said to be real": (wrong_old_padding, CacheMismatchError, "padding"),
    "4-D mask over padding": (
        lambda m, c: m(prompt(1, 2), attention_mask=torch.zeros(2, 1, 1, 13), cache=c),
        CacheMismatchError,
        "2-D mask",
    ),
    "dict of masks": (
        lambda m, c: m(prompt(1, 2), attention_mask={"full_attention": None}, cache=c),
        UnsupportedModelError,
        "attention_mask",
    ),
    "output_attentions": (
        lambda m, c: m(prompt(1, 2), output_attentions=True, cache=c),
        UnsupportedModelError,
        "output_attentions",
    ),
    "crop of more than there is": (lambda m, c: c.crop(-13), OvalError, "crop"),
    "positive crop": (lambda m, c: c.crop(1), OvalError, "crop"),
}


def filled(oval: Attachment, model: PreTrainedModel) -> tuple[OvalCache, dict[str, torch.Tensor]]:
    """A cache of a padded batch of two rows and 12 columns."""
    inputs = padded([12, 7])
    cache = oval.new_cache()
    with torch.no_grad():
        model(
            **inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(0), cache=cache
        )
    return cache, inputs


def goes_on(model: PreTrainedModel, cache: OvalCache, inputs: dict[str, torch.Tensor]) -> None:
    """Checks that the cache still gives the text that a fresh start gives."""
    ids = torch.cat([inputs["input_ids"], prompt(2, 2, seed=4)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], 1)
    want = run(model, ids, attention_mask=mask, use_oval=False).sequences
    got = run(model, ids, attention_mask=mask, cache=cache).sequences
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("wrong", WRONG_FORWARDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_wrong_forward_is_named_and_the_cache_goes_on(name: str, wrong: str) -> None:
    model = shared(name)
    call, error, message = WRONG_FORWARDS[wrong]
    with attach(model) as oval:
        cache, inputs = filled(oval, model)
        with pytest.raises(error, match=message) as caught, torch.no_grad():
            call(model, cache)
        assert "Allowed" in str(caught.value)
        goes_on(model, cache, inputs)


READY_MASKS: dict[str, torch.Tensor] = {
    "another batch": torch.ones(3, 1, 5, 5, dtype=torch.bool).tril(),
    "another number of heads": torch.ones(2, 3, 5, 5, dtype=torch.bool).tril(),
    "whole numbers": torch.ones(2, 1, 5, 5, dtype=torch.long).tril(),
    "too few keys": torch.ones(2, 1, 5, 4, dtype=torch.bool),
    "too many queries": torch.ones(2, 1, 6, 5, dtype=torch.bool),
}


@pytest.mark.parametrize("wrong", READY_MASKS)
@torch.no_grad()
def test_a_wrong_ready_mask_is_named(wrong: str) -> None:
    model, ids = shared("llama"), prompt(5, 2)
    with attach(model) as oval:
        cache = oval.new_cache()
        with pytest.raises(OvalError, match="4-D attention_mask"):
            model(ids, attention_mask=READY_MASKS[wrong], cache=cache)
        assert cache.get_seq_length() == 0
        assert (model(ids, cache=cache).logits - model(ids).logits).abs().max() < 1e-4


@torch.no_grad()
def test_a_cache_is_refused_by_other_models() -> None:
    model, other, third = shared("llama"), shared("llama", 5), shared("qwen2")
    with attach(model) as oval, attach(other):
        cache, inputs = filled(oval, model)
        for stranger in (other, third):  # attached, and not attached
            with pytest.raises(CacheMismatchError, match="Allowed"):
                stranger(prompt(1, 2), cache=cache)
            with pytest.raises(CacheMismatchError, match="Allowed"):
                stranger.generate(prompt(14, 2), cache=cache, max_new_tokens=2)
        goes_on(model, cache, inputs)


def test_a_cache_is_refused_after_detach_and_can_be_passed_on() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache, _ = filled(oval, model)
    ids = torch.cat([prompt(12, 2), prompt(2, 2)], 1)
    with pytest.raises(CacheMismatchError, match="to_dynamic_cache"):
        model.generate(ids, cache=cache, max_new_tokens=2)
    with attach(model), pytest.raises(CacheMismatchError, match="earlier attach"):
        model.generate(ids, cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 12
    assert cache.to_dynamic_cache().get_seq_length() == 12


def test_a_dtype_change_between_turns_is_named() -> None:
    model = build("llama")
    with attach(model) as oval:
        cache, inputs = filled(oval, model)
        model.to(torch.bfloat16)
        with pytest.raises(CacheMismatchError, match="float32.*dtype"), torch.no_grad():
            model(prompt(1, 2), cache=cache)
        model.to(torch.float32)
        model.load_state_dict(shared("llama").state_dict())
        goes_on(model, cache, inputs)


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_prompt_longer_than_the_positions_is_named(chunk: int | None) -> None:
    model = build("llama", max_position_embeddings=40)
    with attach(model) as oval:
        with pytest.raises(PromptTooLongError, match="got 4[12].*Allowed: 40"):
            run(model, prompt(41 if chunk is None else 42), prefill_chunk_size=chunk)
        cache, inputs = filled(oval, model)
        with pytest.raises(PromptTooLongError, match="Allowed: 40"), torch.no_grad():
            model(prompt(29, 2), cache=cache)
        goes_on(model, cache, inputs)
        run(model, prompt(40), max_new_tokens=1)


def test_padding_does_not_count_as_positions() -> None:
    model = build("llama", max_position_embeddings=40)
    inputs = padded([44, 30])
    inputs["attention_mask"][0, :8] = 0
    want = run(model, **inputs, max_new_tokens=2).sequences
    with attach(model):
        assert run(model, **inputs, max_new_tokens=2).sequences.tolist() == want.tolist()


@pytest.mark.parametrize("where", ["call", "generation_config", "config"])
def test_attention_weights_are_refused_wherever_they_are_asked_for(where: str) -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    kwargs = {"output_attentions": True} if where == "call" else {}
    if where == "generation_config":
        model.generation_config.output_attentions = True
    if where == "config":
        model.config.output_attentions = True
    with attach(model), pytest.raises(UnsupportedModelError, match="output_attentions"):
        run(model, prompt(5), **kwargs)


SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXT = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}


def llava_of_gpt2() -> PreTrainedModel:
    """LLaVA around a decoder that OVAL does not know."""
    vision = {"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2}
    config = LlavaConfig(
        vision_config={**vision, **SMALL, "num_attention_heads": 2},
        text_config=GPTNeoXConfig(**SMALL),
    )
    return LlavaForConditionalGeneration._from_config(config)


def gemma3_with_images() -> PreTrainedModel:
    """Gemma 3 with its vision tower: image tokens see each other both ways."""
    vision = {"image_size": 4, "patch_size": 2, **SMALL}
    return Gemma3ForConditionalGeneration._from_config(
        Gemma3Config(text_config=TEXT, vision_config=vision)
    )


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (
        lambda: AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
        ),
        "gpt2",
    ),
    "gpt_neox": (lambda: AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL)), "gpt_neox"),
    "mamba": (
        lambda: AutoModelForCausalLM.from_config(
            MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        "mamba",
    ),
    "t5": (
        lambda: T5ForConditionalGeneration._from_config(
            T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "encoder-decoder.*t5",
    ),
    "gemma3 with images": (gemma3_with_images, "gemma3"),
    "llava of gpt_neox": (llava_of_gpt2, "gpt_neox"),
    "a bare decoder": (lambda: shared("llama").model, "LlamaModel"),
    "no model": (lambda: torch.nn.Linear(2, 2), "Linear"),
    "nothing": (lambda: None, "NoneType"),
    "bidirectional": (
        lambda: build("gemma3", use_bidirectional_attention=True),
        "bidirectional",
    ),
    "unknown layers": (
        lambda: build("qwen2", layer_types=["chunked_attention"] + ["full_attention"] * 2),
        "chunked_attention",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_cannot_be_exact_is_refused_by_name(kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    model = make()
    before = dict(vars(model)) if model is not None else {}
    with pytest.raises(UnsupportedModelError, match=message):
        attach(model)
    assert model is None or vars(model) == before


def test_a_close_model_type_is_suggested() -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean 'gemma3_text'|gemma3_text"):
        attach(gemma3_with_images())


def test_phi3_past_its_short_rope_is_named() -> None:
    model = build("phi3", original_max_position_embeddings=20)
    with attach(model) as oval:
        want = run(model, prompt(12), max_new_tokens=6, use_oval=False).sequences.tolist()
        assert run(model, prompt(12), max_new_tokens=6).sequences.tolist() == want
        with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
            run(model, prompt(12), max_new_tokens=16)
        assert oval.counters.forwards > 0
        assert run(model, prompt(12), max_new_tokens=6).sequences.tolist() == want
        run(model, prompt(12), max_new_tokens=16, use_oval=False)


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "use_oval text": ({"use_oval": "yes"}, "use_oval.*'yes'.*True or False"),
    "use_oval number": ({"use_oval": 1}, "use_oval"),
    "use_oval none": ({"use_oval": None}, "use_oval"),
    "router without score": (
        {"oval_router": torch.nn.Linear(2, 2)},
        "oval_router: got Linear.*OVALRouter",
    ),
    "router name": ({"oval_router": "x"}, "oval_router.*str"),
    "page manager name": ({"oval_page_manager": "x"}, "oval_page_manager.*'x'"),
    "page manager number": ({"oval_page_manager": 3}, "oval_page_manager"),
}


@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS)
def test_a_wrong_argument_of_generate_is_named(wrong: str) -> None:
    model = shared("llama")
    kwargs, message = WRONG_ARGUMENTS[wrong]
    with attach(model) as oval:
        with pytest.raises(ConfigError, match=message):
            model.generate(prompt(5), max_new_tokens=2, **kwargs)
        assert oval.counters.forwards == 0


def test_the_call_style_of_the_article_is_accepted() -> None:
    model = shared("llama")
    want = run(model, prompt(9)).sequences.tolist()
    router = OVALRouter(hidden_size=model.config.hidden_size, num_pages=64, top_k=4)
    parts = {"oval_router": router.eval(), "oval_page_manager": PageManager(64, 8)}
    with attach(model) as oval:
        assert run(model, prompt(9), use_oval=True, **parts).sequences.tolist() == want
        assert oval.counters.forwards == 12


def test_a_router_of_the_call_chooses_where_the_policy_selects() -> None:
    model = shared("llama")
    router = OVALRouter(hidden_size=model.config.hidden_size, num_pages=64).eval()
    asked = []
    score = router.score
    router.score = lambda view: asked.append(len(view.starts)) or score(view)
    routing = {"token_budget": 16, "window_size": 4, "dense_layers": [0], "router": "recency"}
    with attach(model, {"policy": "routed", "page_size": 4, "routing": routing}) as oval:
        run(model, prompt(40), max_new_tokens=6, oval_router=router)
        assert oval.stats()["routing"]["selections"] == 5
    assert len(asked) == 5
    assert min(asked) >= 10


@pytest.mark.parametrize("typo", ["max_new_token", "use_ovl", "oval_roter"])
def test_a_misspelt_argument_of_generate_is_reported_by_hugging_face(typo: str) -> None:
    model = shared("llama")
    with attach(model), pytest.raises(ValueError, match=typo):
        model.generate(prompt(5), **{typo: 3})


def test_oval_arguments_are_unknown_after_detach() -> None:
    model = shared("llama")
    attach(model).detach()
    with pytest.raises(ValueError, match="use_oval"):
        model.generate(prompt(5), use_oval=True)


@pytest.mark.parametrize("reserve", [-5, 1.5, "x", True])
def test_a_wrong_reserve_is_named(reserve: Any) -> None:
    model = shared("llama")
    with attach(model) as oval, pytest.raises(ConfigError, match="reserve_tokens"):
        oval.new_cache(reserve_tokens=reserve)


def test_an_oval_cache_with_use_oval_false_is_refused() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache, inputs = filled(oval, model)
        with pytest.raises(OvalError, match="use_oval"):
            model.generate(prompt(14, 2), cache=cache, use_oval=False, max_new_tokens=2)
        goes_on(model, cache, inputs)

"""Attach leaves no trace after detach, touches only calls with an OVAL cache, and survives errors in a layer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import TINY, assert_same_run, build, one_thread, padded, prompt, run, shared
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

from oval_adapters import attach
from oval_core.errors import CacheMismatchError, OvalError, UnsupportedModelError

_one_thread = pytest.fixture(autouse=True)(one_thread)


def trace(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that attach could leave behind."""
    modules = list(model.modules())
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_forward_hooks_with_kwargs",
    )
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "attributes": [
            {k: v for k, v in vars(m).items() if not k.startswith("_")} for m in modules
        ],
        "hooks": [[dict(getattr(m, hook)) for hook in hooks] for m in modules],
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "implementations": [
            m.config._attn_implementation for m in modules if isinstance(m, PreTrainedModel)
        ],
    }


class BoomError(Exception):
    """Raised by a layer on purpose."""


class Fuse:
    """Makes a layer raise in place of its forward, until it is mended."""

    def __init__(self, model: PreTrainedModel, error: type[BaseException], layer: int = 1) -> None:
        module = model.get_decoder().layers[layer]
        self._handle = module.register_forward_pre_hook(self._blow)
        self.error = error

    def _blow(self, *args: Any) -> None:
        raise self.error

    def mend(self) -> None:
        """Takes the error away."""
        self._handle.remove()


@pytest.mark.parametrize("name", TINY)
def test_detach_leaves_no_trace(name: str) -> None:
    model = build(name)
    before, want = trace(model), run(model, **padded([14, 5]))
    oval = attach(model)
    assert oval.is_attached
    run(model, **padded([14, 5]))
    oval.detach()
    assert not oval.is_attached
    assert trace(model) == before
    after = run(model, **padded([14, 5]))
    assert torch.equal(after.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(after.logits, want.logits, strict=True))


def test_the_config_names_plain_attention_while_attached() -> None:
    model = shared("llama")
    config = model.config.to_dict()
    with attach(model):
        run(model, prompt(5))
        assert model.config._attn_implementation == "sdpa"
        assert model.config.to_dict() == config


def test_detach_twice_is_harmless() -> None:
    model = build("llama")
    before = trace(model)
    oval = attach(model)
    oval.detach()
    oval.detach()
    assert trace(model) == before
    with attach(model):
        pass
    assert trace(model) == before


def test_an_error_inside_with_detaches() -> None:
    model = build("llama")
    before = trace(model)
    with pytest.raises(BoomError), attach(model):
        raise BoomError
    assert trace(model) == before


def test_a_second_attach_is_refused_and_the_first_goes_on() -> None:
    model = build("llama")
    want = run(model, prompt(9))
    before = trace(model)
    with attach(model) as oval:
        with pytest.raises(UnsupportedModelError, match="attached already.*detach"):
            attach(model)
        assert_same_run(run(model, prompt(9)), want)
        assert oval.counters.forwards > 0
    assert trace(model) == before


@pytest.mark.parametrize("bad", [{"page_size": 99}, {"backend": "none"}, "no-such-config"])
def test_a_refused_attach_leaves_no_trace(bad: Any) -> None:
    model = build("llama")
    before = trace(model)
    with pytest.raises(OvalError):
        attach(model, bad)
    assert trace(model) == before


def wrap(module: torch.nn.Module, calls: list[int]) -> Callable[..., Any]:
    """Wraps `module.forward` on the instance, without functools.wraps, as hand-written hooks do."""
    inner = module.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    module.forward = wrapper  # type: ignore[method-assign]
    return wrapper


@pytest.mark.parametrize("positional", [True, False])
def test_a_forward_wrapped_before_attach_stays_wrapped(positional: bool) -> None:
    model, calls, ids = build("llama"), [], prompt(9)
    decoder = model.get_decoder()
    want = run(model, ids)
    wrapper = wrap(decoder, calls)
    with attach(model) as oval:
        assert_same_run(run(model, ids), want)
        assert len(calls) == 12
        with torch.no_grad():
            plain = decoder(ids)[0] if positional else decoder(input_ids=ids)[0]
            cache = oval.new_cache()
            args = (ids, None, None, cache) if positional else ()
            ours = decoder(*args, **({} if positional else {"input_ids": ids, "cache": cache}))[0]
        assert (plain - ours).abs().max() < 1e-4
    assert decoder.__dict__["forward"] is wrapper


def test_a_forward_wrapped_after_attach_must_be_unwrapped_first() -> None:
    model = build("llama")
    before = trace(model)
    want = run(model, prompt(9))
    oval = attach(model)
    decoder = model.get_decoder()
    ours = decoder.__dict__["forward"]
    wrap(decoder, [])
    with pytest.raises(OvalError, match="replaced after attach"):
        oval.detach()
    assert oval.is_attached
    assert_same_run(run(model, prompt(9)), want)
    assert oval.counters.forwards > 0, "a refused detach must change nothing"
    decoder.__dict__["forward"] = ours
    oval.detach()
    assert trace(model) == before


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "no-cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "dynamic": {"cache_implementation": "dynamic"},
    "config-without-cache": {"generation_config": GenerationConfig(use_cache=False)},
    "use-oval-false": {"use_oval": False},
}


@pytest.mark.parametrize("call", OTHER_CALLS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "llava"])
def test_calls_that_choose_another_cache_are_plain_hugging_face(name: str, call: str) -> None:
    model, kwargs = shared(name), OTHER_CALLS[call]
    plain = {key: value for key, value in kwargs.items() if key != "use_oval"}
    want = run(model, prompt(9), **plain)
    with attach(model) as oval:
        got = run(model, prompt(9), **kwargs)
        assert oval.counters.forwards == 0
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_forwards_with_other_caches_are_plain_hugging_face(name: str) -> None:
    model, ids = shared(name), prompt(9)
    want = [model(ids).logits, model(ids, cache=DynamicCache(config=model.config)).logits]
    with attach(model) as oval:
        got = [model(ids).logits, model(ids, cache=DynamicCache(config=model.config)).logits]
        assert oval.counters.forwards == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_without_a_cache_are_those_of_plain_hugging_face() -> None:
    model, ids = build("llama").train(), prompt(9)
    model(ids, labels=ids).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with attach(model):
        model(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("implementation", ["static", "hybrid"])
@pytest.mark.parametrize("passed", ["keywords", "config", "positional"])
def test_a_default_cache_of_the_model(implementation: str, passed: str) -> None:
    """An old default that transformers itself drops gives way; a real choice stands, and is said."""
    model, ids = build("gemma2"), prompt(9)
    want = run(model, ids)
    model.generation_config.cache_implementation = implementation
    config = GenerationConfig(max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
    before = trace(model)
    with attach(model) as oval:
        if passed == "keywords":
            got = run(model, ids)
        elif passed == "config":
            got = model.generate(ids, generation_config=config)
        else:
            got = model.generate(ids, config)
        assert oval.counters.forwards == (12 if implementation == "hybrid" else 0)
    assert_same_run(got, want)
    assert trace(model) == before


def test_no_cache_under_the_old_name_makes_an_oval_cache_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = shared("llama")
    with attach(model) as oval:
        run(model, prompt(5), past_key_values=None)
        assert oval.counters.forwards > 0
    assert not [w for w in recwarn if "Both `past_key_values`" in str(w.message)]


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@torch.no_grad()
def test_an_error_in_a_layer_leaves_the_cache_as_it_was(
    name: str, error: type[BaseException]
) -> None:
    model, ids = shared(name), prompt(20)
    want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        model(ids[:, :13], cache=cache)
        keys = cache.layers[0].keys
        fuse = Fuse(model, error)
        for count in (1, 5):
            with pytest.raises(error):
                model(ids[:, :count], cache=cache)
        fuse.mend()
        assert model.config._attn_implementation == "sdpa"
        assert cache.get_seq_length() == 13
        assert torch.equal(cache.layers[0].keys, keys)
        cache.paged.table.check_integrity()
        got = model(ids[:, 13:], cache=cache).logits
        assert (got - want[:, 13:]).abs().max() < 1e-4
    assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
def test_an_interrupted_generate_can_be_repeated(error: type[BaseException]) -> None:
    model = shared("llama")
    want = run(model, prompt(9))
    with attach(model):
        fuse = Fuse(model, error)
        with pytest.raises(error):
            run(model, prompt(9))
        fuse.mend()
        with torch.no_grad():  # no forward without a cache may be taken for one of generate
            model(prompt(9))
        assert_same_run(run(model, prompt(9)), want)


@torch.no_grad()
def test_a_first_forward_that_fails_leaves_the_cache_empty() -> None:
    model, ids = shared("llama"), prompt(9, 3)
    with attach(model) as oval:
        cache = oval.new_cache()
        fuse = Fuse(model, BoomError)
        with pytest.raises(BoomError):
            model(ids[:2], cache=cache)
        fuse.mend()
        assert cache.get_seq_length() == 0
        assert cache.batch_size == -1
        assert cache.layers[2].keys is None
        assert cache.to_dynamic_cache().get_seq_length() == 0
        got = model(ids, cache=cache).logits
        assert (got - model(ids).logits).abs().max() < 1e-4


def in_threads(*jobs: Callable[[], None]) -> list[BaseException]:
    """Runs jobs at the same time; returns what they raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 -- handed to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("other", [{}, {"use_oval": False}, {"use_cache": False}])
def test_two_threads_on_one_model(other: dict[str, Any]) -> None:
    model = shared("llama")
    kwargs = {"max_new_tokens": 30, "return_dict_in_generate": False, "output_logits": False}
    want = [run(model, prompt(9, seed=s), **kwargs).tolist() for s in (1, 2)]
    with attach(model):

        def job(seed: int, extra: dict[str, Any]) -> Callable[[], None]:
            def work() -> None:
                for _ in range(2):
                    got = model.generate(prompt(9, seed=seed), max_new_tokens=30, **extra)
                    assert got.tolist() == want[seed - 1]

            return work

        assert in_threads(job(1, {}), job(2, other)) == []
        assert model.config._attn_implementation == "sdpa"


def test_two_models_attached_at_once() -> None:
    models = [shared("llama"), shared("llama", 5), shared("gemma3")]
    want = [run(model, prompt(9)) for model in models]
    first = attach(models[0])
    others = [attach(model) for model in models[1:]]
    for model, result in zip(models, want, strict=True):
        assert_same_run(run(model, prompt(9)), result)
    first.detach()
    for model, result in zip(models, want, strict=True):
        assert_same_run(run(model, prompt(9)), result)
    for oval in others:
        oval.detach()


def test_a_copy_of_an_attached_model_is_refused_as_it_would_run_the_first_ones_layers() -> None:
    model = build("llama")
    with attach(model), pytest.raises(CacheMismatchError, match="detach"):
        copy.deepcopy(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(prompt(9)).logits, model(prompt(9)).logits)


def test_train_mode_without_gradients_is_evaluated_as_it_is() -> None:
    model = build("llama").train()
    want = run(model, prompt(9))
    with attach(model):
        assert_same_run(run(model, prompt(9)), want)


def test_dropout_in_train_mode_is_refused_or_applied() -> None:
    model = build("llama", attention_dropout=0.5).train()
    with attach(model) as oval, torch.no_grad(), pytest.raises(OvalError, match="dropout"):
        model(prompt(9), cache=oval.new_cache())


def test_gradients_with_an_oval_cache_are_refused() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache = oval.new_cache()
        with pytest.raises(CacheMismatchError, match="no_grad"):
            model(prompt(9), cache=cache)
        with torch.no_grad():
            assert (
                model(prompt(9), cache=cache).logits - model(prompt(9)).logits
            ).abs().max() < 1e-4

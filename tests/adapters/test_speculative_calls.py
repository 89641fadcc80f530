"""What surrounds the loop: streamers, turns, stop strings, sampling, refusals, interrupts, turning off."""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_scenarios import LENGTHS, MANY_EOS
from reference_speculative import ScriptedDrafter
from tiny_models import (
    VOCAB,
    build,
    one_thread,
    padded,
    pictures,
    prompt,
    put_image,
    save_checkpoint,
    shared,
)
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from oval_adapters import attach
from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative import speculative as home
from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree
from oval_spec.turn_off import SpeculationSwitch

_one_thread = pytest.fixture(autouse=True)(one_thread)
ALWAYS = {"turns_off": False, "max_nodes": 12}


def text_of(model: PreTrainedModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=count, do_sample=False)


class Collect:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts, then each column."""
        self.tokens.append(value.tolist())

    def end(self) -> None:
        """Takes note of the end."""
        self.ended += 1


@pytest.mark.parametrize("ends", [None, MANY_EOS])
def test_a_streamer_gets_the_columns_of_plain_decoding(ends: list[int] | None) -> None:
    model = shared("llama")
    call = {**padded(LENGTHS), "max_new_tokens": 12, "do_sample": False, "eos_token_id": ends}
    wanted, got = Collect(), Collect()
    want = model.generate(**call, streamer=wanted)
    starts = [30 - n for n in LENGTHS]
    texts = {row: want[row, start:].tolist() for row, start in enumerate(starts)}
    with attach(model) as oval:
        model.generate(
            **call,
            streamer=got,
            custom_generate=oval.speculative,
            oval_drafter=ScriptedDrafter(texts, "late", VOCAB),
            speculation=ALWAYS,
        )
    assert got.tokens == wanted.tokens
    assert got.ended == wanted.ended == 1


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_second_turn_goes_on_with_the_same_cache(name: str) -> None:
    model, ids = shared(name), prompt(18)
    first = text_of(model, ids, 9)
    longer = torch.cat([first, prompt(7, seed=4)], 1)
    want = text_of(model, longer, 11)
    drafter = ScriptedDrafter({0: want[0].tolist()}, "tree", VOCAB, needs_hidden=True)
    with attach(model) as oval:
        extra = {"custom_generate": oval.speculative, "oval_drafter": drafter}
        cache = oval.new_cache()
        one = model.generate(ids, max_new_tokens=9, do_sample=False, cache=cache, **extra)
        assert one.tolist() == first.tolist()
        assert cache.get_seq_length() == first.shape[1] - 1
        two = model.generate(longer, max_new_tokens=11, do_sample=False, cache=cache, **extra)
        assert oval.counters.tokens_written == want.shape[1] - 1, "nothing was read twice"
    assert two.tolist() == want.tolist()


def test_hidden_states_are_those_before_the_root() -> None:
    model, ids = shared("llama"), prompt(18)
    want = text_of(model, ids, 14)
    drafter = ScriptedDrafter({0: want[0].tolist()}, "tree", VOCAB, needs_hidden=True)
    states: list[tuple[int, torch.Tensor]] = []
    drafter.draft = functools.partial(_note, states, drafter.draft)  # type: ignore[method-assign]
    with attach(model) as oval:
        model.generate(
            ids, max_new_tokens=14, custom_generate=oval.speculative, oval_drafter=drafter
        )
    with torch.no_grad():
        hidden = model.model(want).last_hidden_state[0]
    assert len(states) > 2
    for length, state in states:
        torch.testing.assert_close(state, hidden[length - 2], atol=1e-4, rtol=1e-4)


def _note(
    states: list[tuple[int, torch.Tensor]], draft: Any, requests: Sequence[DraftRequest]
) -> list[Draft]:
    states += [(len(request.ids), request.hidden.clone()) for request in requests]
    found: list[Draft] = draft(requests)
    return found


@pytest.mark.parametrize("given", ["keyword", "config", "model"])
def test_stop_strings_end_within_a_run(given: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build("llama", vocab_size=len(tokenizer))
    ids = prompt(12)
    text = text_of(model, ids, 20)
    words = [tokenizer.decode([token]) for token in text[0].tolist()]
    stop = next(w for w in words[15:31] if w.isascii() and w.isprintable() and w not in words[:15])
    call: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "stop_strings": stop}
    if given == "config":
        call = {"generation_config": GenerationConfig(**call)}
    if given == "model":
        model.generation_config.stop_strings = call.pop("stop_strings")
    want = model.generate(ids, tokenizer=tokenizer, **copy.deepcopy(call))
    assert want.shape[1] < text.shape[1]
    with attach(model) as oval:
        extra = {"custom_generate": oval.speculative, "speculation": ALWAYS}
        drafter = ScriptedDrafter({0: text[0].tolist()}, "right", len(tokenizer))
        got = model.generate(ids, tokenizer=tokenizer, oval_drafter=drafter, **call, **extra)
        assert oval.stats()["speculation"]["accepted"] > 0
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(ids, **call, **extra)
    assert got.tolist() == want.tolist()
    if given == "config":
        assert call["generation_config"].stop_strings == stop, "the caller's settings were changed"


def test_images_are_read_once() -> None:
    model, ids = shared("llava"), prompt(24, batch=2)
    put_image(ids, 0, 5)
    put_image(ids, 1, 9)
    call = {"inputs": ids, "pixel_values": pictures(2), "max_new_tokens": 9, "do_sample": False}
    want = model.generate(**call)
    drafter = ScriptedDrafter({row: want[row].tolist() for row in range(2)}, "tree", VOCAB)
    with attach(model) as oval:
        got = model.generate(**call, custom_generate=oval.speculative, oval_drafter=drafter)
        assert oval.stats()["speculation"]["accepted"] > 0
    assert got.tolist() == want.tolist()


def test_a_mask_that_hides_cached_tokens_is_refused() -> None:
    model, batch = shared("llama"), padded([12, 9])
    with attach(model) as oval:
        first = model.generate(**batch, max_new_tokens=5, return_dict_in_generate=True)
        mask = torch.ones_like(first.sequences)
        mask[0, -3] = 0
        mask[1, :3] = 0
        with pytest.raises(ConfigError, match="attention_mask"):
            model.generate(
                first.sequences,
                attention_mask=mask,
                cache=first.cache,
                max_new_tokens=5,
                custom_generate=oval.speculative,
            )


def test_embeddings_are_read_as_generate_does() -> None:
    model, batch = shared("llama"), padded([18, 11])
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    call = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    settings = {"max_new_tokens": 9, "do_sample": False}
    want = model.generate(**call, **settings)
    texts = {row: want[row].tolist() for row in range(2)}
    drafter = ScriptedDrafter(texts, "right", VOCAB)
    with attach(model) as oval:
        got = model.generate(
            **call, **settings, custom_generate=oval.speculative, oval_drafter=drafter
        )
        assert oval.stats()["speculation"]["accepted"] > 0
    assert got.tolist() == want.tolist()


SMALL = 9


class Twins:
    """Always proposes the same small tree: several children a node, so that drawing once a child would show."""

    name = "twins"
    needs_hidden = False

    def reset(self) -> None:
        """Does nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns it for each request."""
        return [Draft(TokenTree((r.ids[-1], 5, 6, 7, 6, 5), (-1, 0, 0, 0, 1, 2))) for r in requests]


@pytest.mark.parametrize("warped", [{}, {"temperature": 0.7, "top_k": 5}])
def test_sampled_tokens_have_the_distribution_of_plain_sampling(warped: dict[str, Any]) -> None:
    model = build("llama", vocab_size=SMALL, num_hidden_layers=1, eos_token_id=None)
    ids, rows = torch.tensor([[5, 6, 7, 8, 5]]), 500
    torch.manual_seed(11)
    with attach(model) as oval:
        got = model.generate(
            ids,
            do_sample=True,
            top_k=warped.get("top_k", 0),
            temperature=warped.get("temperature", 1.0),
            num_return_sequences=rows,
            max_new_tokens=4,
            custom_generate=oval.speculative,
            oval_drafter=Twins(),
            speculation=ALWAYS,
        )
        assert oval.stats()["speculation"]["accepted"] > 0
    assert got.shape == (rows, 9)
    pairs = got[:, 6] * SMALL + got[:, 7]  # second and third token
    want = rows * _pairs(model, ids, **warped).flatten()
    seen = torch.bincount(pairs, minlength=SMALL**2).double()
    assert float(seen[want == 0].sum()) == 0
    rare = want < 3
    cells = torch.cat([want[~rare], want[rare].sum()[None]])
    found = torch.cat([seen[~rare], seen[rare].sum()[None]])
    statistic = ((found - cells).square() / cells).sum()
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom, statistic / 2)) > 1e-4


def _pairs(
    model: PreTrainedModel, ids: torch.Tensor, temperature: float = 1.0, top_k: int = SMALL
) -> torch.Tensor:
    """Probabilities of the second and third new token, [V, V]."""
    texts = torch.cartesian_prod(*[torch.arange(SMALL)] * 2)
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(texts), -1), texts], 1)).logits[:, 4:7].double()
    logits = logits / temperature
    least = logits.topk(top_k, dim=-1).values[..., -1:]
    p = logits.masked_fill(logits < least, -torch.inf).softmax(-1).view(SMALL, SMALL, 3, SMALL)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    return torch.einsum("a,ab,abc->bc", first, second, third)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_att"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hid"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "assistant": ({"assistant_model": "model"}, "assistant_model"),
    "without": ({"use_oval": False}, "use_oval=False"),
    "no cache": ({"use_cache": False}, "cache"),
    "settings": ({"speculation": {"drafter": "medusas"}}, "medusa"),
    "drafter": ({"oval_drafter": "medusa"}, "not its name"),
    "no heads": ({"speculation": {"drafter": "medusa"}}, "no heads ship"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(case: str) -> None:
    model = shared("llama")
    arguments, message = REFUSED[case]
    if case == "assistant":
        arguments = {"assistant_model": shared("llama", 1)}
    with attach(model) as oval:
        cache = oval.new_cache()
        arguments = {"cache": cache, **arguments} if "use" not in str(arguments) else arguments
        with pytest.raises(ConfigError, match=message):
            model.generate(prompt(5), custom_generate=oval.speculative, **arguments)
        assert cache.get_seq_length() == 0, "work was done before"
    with pytest.raises(ConfigError, match="not attached"):
        model.generate(prompt(5), custom_generate=oval.speculative)


@pytest.fixture
def _ctrl_c_is_heard() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_is_heard")
@pytest.mark.parametrize("place", ["draft", "forward", "accept", "criterion"])
def test_an_interrupt_in_a_step_leaves_the_cache_whole(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = shared("llama"), padded([17, 12])
    settings = {"max_new_tokens": 14, "do_sample": False}
    want = model.generate(**batch, **settings)
    texts = {0: want[0].tolist(), 1: want[1, 5:].tolist()}
    drafter = ScriptedDrafter(texts, "tree", VOCAB)
    calls = 0

    def cut(real: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    extra: dict[str, Any] = {}
    with attach(model) as oval:
        cache = oval.new_cache()
        with monkeypatch.context() as patch:
            if place == "draft":
                patch.setattr(drafter, "draft", functools.partial(cut, drafter.draft))
            if place == "forward":
                layer = model.model.layers[1]
                patch.setattr(layer, "forward", functools.partial(cut, layer.forward))
            if place == "accept":
                real = OvalCache.accept
                patch.setattr(OvalCache, "accept", lambda *args: cut(real, *args))
            if place == "criterion":
                extra["stopping_criteria"] = [lambda ids, _: cut(lambda: ids[:, 0] < 0)]
            with pytest.raises(KeyboardInterrupt):
                model.generate(
                    **batch,
                    **settings,
                    **extra,
                    cache=cache,
                    custom_generate=oval.speculative,
                    oval_drafter=drafter,
                    speculation=ALWAYS,
                )
        assert not cache.is_held
        lengths = [seq.length for seq in cache.paged.table.sequences]
        kept = min(lengths[0], lengths[1] + 5)
        cache.crop(kept - cache.get_seq_length())
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 14, dtype=torch.long)], 1)
        rest = want[:, : kept + 2]
        got = model.generate(
            rest,
            attention_mask=mask[:, : kept + 2],
            cache=cache,
            max_new_tokens=want.shape[1] - kept - 2,
            do_sample=False,
        )
    assert got.tolist() == want.tolist()


def test_speculation_that_is_slower_turns_itself_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids, now = shared("llama"), prompt(10), 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5
        return now

    class Slow(ScriptedDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            nonlocal now
            now += 2.0
            return super().draft(requests)

    monkeypatch.setattr(
        home, "SpeculationSwitch", functools.partial(SpeculationSwitch, clock=clock)
    )
    want = text_of(model, ids, 80)
    drafter = Slow({}, "wrong", VOCAB)
    with attach(model) as oval:
        got = model.generate(
            ids,
            max_new_tokens=80,
            do_sample=False,
            custom_generate=oval.speculative,
            oval_drafter=drafter,
        )
        stats = oval.stats()["speculation"]
    assert got.tolist() == want.tolist()
    assert stats["is_off"]
    assert "speculation is off" in stats["switched"]
    assert "speculation is off" in caplog.text
    assert 32 <= len(drafter.requests) < 60

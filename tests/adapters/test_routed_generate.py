"""`generate` under the policies that select: all ways to call it, caches of many lives, and what a small budget computes."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_scenarios import CORE, MORE, check
from reference_masked import Forwards, recorded, replayed
from tiny_models import assert_same_run, build, one_thread, padded, prompt, run, shared
from tiny_routers import ALL, GEMMA, TIERS, routed, router_for
from transformers import PreTrainedModel

from oval_adapters import attach
from oval_adapters.routing.resolve import model_facts
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.key_book import KeyBook
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.row_memory import RowMemory

_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a router for the tiny llama."""
    folder, model = tmp_path_factory.mktemp("router"), shared("llama")
    save_router(folder, TrainedRouter(router=router_for(model), model=model_facts(model.config)))
    return str(folder)


@pytest.mark.parametrize("scenario", {**CORE, **MORE})
def test_a_budget_for_everything_equals_hugging_face(scenario: str) -> None:
    policy = "routed" if scenario in CORE else "guarded"
    stats = check("llama", scenario, routed(policy, router="quest", token_budget=ALL))["routing"]
    assert stats["selections"] == 0 < stats["dense_forwards"]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "phi3", "llava"])
def test_every_family_with_a_budget_for_everything(name: str) -> None:
    check(name, "beams-padded", routed(router="sketch", budget_share=1.0))


@pytest.mark.parametrize("scenario", ["padded-batch", "beams-padded", "guidance", "lookup"])
def test_a_full_coverage_equals_hugging_face_for_any_budget(scenario: str) -> None:
    check("llama", scenario, routed("guarded", router="recency", token_budget=8, coverage=1.0))


@pytest.mark.parametrize("scenario", ["beams-padded", "uneven-ends", "lookup"])
@pytest.mark.parametrize("router", ["recency", "quest", "random", "trained"])
def test_a_small_budget_generates_all_the_same(scenario: str, router: str, trained: str) -> None:
    model = shared("llama")
    named = trained if router == "trained" else router
    call = {**CORE, **MORE}[scenario](model)
    with attach(model, routed(router=named, audit_every=3)) as oval:
        got = run(model, **call)
        stats = oval.stats()["routing"]
    assert got.sequences.shape[0] == run(model, **call).sequences.shape[0]
    assert torch.isfinite(torch.stack(got.logits)).all()
    assert stats["selections"] > 5
    assert 0 < stats["read_share"] < 1
    assert 0 < stats["mass_recall"] <= 1
    assert stats["tokens_read"] < stats["tokens_present"]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "no GQA": ("qwen2", {"num_key_value_heads": 4}),
    "soft cap and windows": ("gemma2", {"num_hidden_layers": 4, "layer_types": GEMMA}),
    "deep": ("qwen3", {"num_hidden_layers": 5}),
}


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("case", CASES)
def test_a_small_budget_is_eager_attention_without_the_other_pages(case: str, policy: str) -> None:
    name, changes = CASES[case]
    model = build(name, **changes)
    config = routed(policy, router="sketch", layer_groups=2, coverage=0.5)
    forwards = recorded(model, config, {**padded([70, 51]), "max_new_tokens": 10})
    check_replay(model, forwards)
    assert len(forwards.ids) == 10
    assert forwards.num_left_out > 300


@pytest.mark.parametrize("router", ["sketch_now", "persistence", "trained"])
def test_every_kind_of_router_is_eager_attention_over_what_it_chose(
    router: str, trained: str
) -> None:
    model = build("llama")
    config = routed(router=trained if router == "trained" else router)
    forwards = recorded(model, config, {"inputs": prompt(70), "max_new_tokens": 8})
    check_replay(model, forwards)
    assert forwards.num_left_out > 300


@pytest.mark.parametrize("policy", ["routed", "guarded"])
def test_drafts_are_verified_over_one_selection(policy: str) -> None:
    """The text is not that of single steps: drafts share a selection, made before the first of them."""
    model = build("llama")
    call = {"inputs": prompt(18).repeat(1, 4), "prompt_lookup_num_tokens": 4}
    forwards = recorded(model, routed(policy, router="sketch", coverage=0.6), call)
    check_replay(model, forwards)
    widths = [ids.shape[1] for ids in forwards.ids[1:]]
    assert max(widths) > 1
    assert forwards.num_left_out > 300
    assert forwards.num_cut > 0, "no draft was rejected"


def check_replay(model: PreTrainedModel, forwards: Forwards) -> None:
    for got, want in zip(forwards.logits, replayed(model, forwards), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("call", [{}, {"prompt_lookup_num_tokens": 4}])
def test_the_same_call_gives_the_same_text(call: dict[str, Any], trained: str) -> None:
    model, ids = shared("llama"), prompt(18).repeat(1, 4)
    with attach(model, routed(router=trained)) as oval:
        first = run(model, ids, **call)
        selections = oval.stats()["routing"]["selections"]
        assert_same_run(run(model, ids, **call), first)
        assert oval.stats()["routing"]["selections"] == 2 * selections


@pytest.mark.parametrize("kind", ["agrees", "disagrees"])
def test_an_assistant_with_a_selection_of_its_own(kind: str) -> None:
    model, assistant = shared("llama"), build("llama", seed=0 if kind == "agrees" else 5)
    settings = {"assistant_model": assistant, "max_new_tokens": 20}
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    with attach(model, routed(token_budget=ALL)), attach(assistant, routed()) as draft:
        assert_same_run(
            run(model, prompt(60), **settings),
            run(model, prompt(60), use_oval=False, max_new_tokens=20),
        )
        assert draft.stats()["routing"]["selections"] > 5
    with attach(model, routed()) as oval:
        assert run(model, prompt(60), **settings).sequences.shape[1] == 80
        assert oval.stats()["routing"]["selections"] > 3


@pytest.mark.parametrize(
    ("router", "chunk"), [("sketch", 16), ("persistence", 8), ("sketch", 40), ("sketch", 89)]
)
def test_a_prompt_in_pieces_is_read_whole(chunk: int, router: str) -> None:
    model, ids = shared("llama"), prompt(90)
    with attach(model, routed(router=router)) as oval:
        want = run(model, ids)
        assert oval.stats()["routing"]["dense_forwards"] == 1
        assert_same_run(run(model, ids, prefill_chunk_size=chunk), want)
        pieces = -(-90 // chunk)
        assert oval.stats()["routing"]["dense_forwards"] == 1 + pieces


@pytest.mark.parametrize("turn", [1, 5, 40])
def test_a_long_turn_in_pieces_is_read_whole_and_a_short_one_as_it_is(turn: int) -> None:
    model, found = shared("llama"), []
    for chunk in (None, 8):
        with attach(model, routed(router="sketch")) as oval:
            first = run(model, prompt(60))
            before = oval.stats()["routing"]["dense_forwards"]
            text = torch.cat([first.sequences, prompt(turn, seed=4)], 1)
            found.append(run(model, text, cache=first.cache, prefill_chunk_size=chunk))
            dense = oval.stats()["routing"]["dense_forwards"] - before
            pieces = 1 if chunk is None else 6  # 41 tokens: the last of the first answer is new too
            assert dense == (pieces if turn == 40 else 0)
    assert_same_run(found[1], found[0])


@pytest.mark.parametrize(
    ("router", "policy", "where", "beams"),
    [
        ("sketch", "routed", "host", 2),
        ("quest", "guarded", "disk", 1),
        ("trained", "routed", "disk", 2),
        ("trained", "guarded", "host", 1),
    ],
)
def test_tiers_change_no_token(
    router: str, policy: str, where: str, beams: int, tmp_path: Path, trained: str
) -> None:
    model, rows = shared("llama"), beams * beams
    call = {**padded([90, 61][:beams]), "num_beams": beams}
    config = routed(policy, router=trained if router == "trained" else router, coverage=0.5)
    place = {} if where == "host" else {"disk": str(tmp_path)}
    with attach(model, {**config, "tiers": {**TIERS, "fast_tokens": 96, **place}}) as oval:
        limit = oval.new_cache().paged.max_new_tokens(rows)
        got = run(model, **call)
        assert oval.stats()["routing"]["selections"] > 5
    with attach(model, config):  # each piece of a prompt leaves its last queries in the history
        assert_same_run(run(model, **call, prefill_chunk_size=limit), got)
    del got
    moved = oval.stats()["tiers"]
    assert moved["bytes_used"] + moved["bytes_wasted"] == moved["bytes_prefetched"]
    assert moved["bytes_stored"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("router", ["trained"])
def test_a_cache_that_nobody_holds_ends_at_once(
    router: str, policy: str, tmp_path: Path, trained: str
) -> None:
    model = shared("llama")
    for tiers in (None, {**TIERS, "disk": str(tmp_path)}):
        config = routed(policy, tiers, router=trained if router == "trained" else router)
        with attach(model, config), by_reference_counts():
            result = run(model, prompt(80), max_new_tokens=4)
            twin = copy.deepcopy(result.cache)
            held = [weakref.ref(p) for p in (twin.paged.pool, result.cache.paged.pool)]
            held += [weakref.ref(result.cache.paged.policy), weakref.ref(result.cache.paged.table)]
            del result, twin
            assert [ref() for ref in held] == [None] * 4
            assert [t.name for t in threading.enumerate() if t.name.startswith("oval")] == []
            assert list(tmp_path.iterdir()) == []


class by_reference_counts:  # noqa: N801 - reads as a phrase
    """Without the collector of cycles."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        gc.enable()


@torch.no_grad()
def test_decoding_keeps_a_fixed_number_of_tensors_and_bytes_by_length() -> None:
    model, sizes = shared("llama"), []
    with attach(model, routed("guarded", router="sketch")) as oval:
        cache = oval.new_cache(reserve_tokens=180)
        model(prompt(80), cache=cache)
        for step in range(83):
            model(prompt(1, seed=step), cache=cache)
            if step in (22, 52, 82):
                sizes.append(live_tensors())
    (few, first), (same, second), (last, third) = sizes
    assert few == same == last
    assert third - second <= 1.5 * (second - first) + 20_000


def live_tensors() -> tuple[int, int]:
    """Number of tensors that anybody holds, and their bytes."""
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return len(found), sum(storages.values())


@pytest.mark.parametrize("router", ["persistence", "trained"])
def test_caches_copies_and_turns_do_not_mix(router: str, trained: str) -> None:
    model = shared("llama")
    config = routed(router=trained if router == "trained" else router)
    with attach(model, config):
        whole = [run(model, prompt(70, seed=seed), max_new_tokens=16) for seed in (1, 2)]
    with attach(model, config):
        parts = [run(model, prompt(70, seed=seed), max_new_tokens=6) for seed in (1, 2)]
        twins = [copy.deepcopy(part.cache) for part in parts]
        for caches in ([part.cache for part in parts], twins):
            for part, cache, want in zip(parts, caches, whole, strict=True):
                got = run(model, part.sequences, cache=cache, max_new_tokens=10)
                assert got.sequences.tolist() == want.sequences.tolist()


@torch.no_grad()
def test_a_cache_that_is_cut_goes_on_from_there() -> None:
    model, ids = shared("llama"), prompt(90)
    with attach(model, routed(router="sketch")) as oval:
        cache = oval.new_cache()
        model(ids, cache=cache)
        for step in range(5):
            model(prompt(1, seed=step), cache=cache)
        cache.crop(-35)
        before = oval.stats()["routing"]
        got = model(ids[:, 60:61], cache=cache).logits[:, -1]
        after = oval.stats()["routing"]
        assert after["dense_forwards"] == before["dense_forwards"] + 1
        torch.testing.assert_close(got, model(ids[:, :61]).logits[:, -1], atol=1e-4, rtol=1e-4)
        model(ids[:, 61:62], cache=cache)
        assert oval.stats()["routing"]["selections"] == after["selections"] + 1
        cache.reset()
        assert_same_run(run(model, ids, cache=cache), run(model, ids))


def test_attachments_in_turn_and_threads_at_once() -> None:
    model = shared("llama")
    want = {}
    for router in ("sketch", "recency"):
        with attach(model, routed(router=router)):
            want[router] = run(model, prompt(70)).sequences.tolist()
    assert want["sketch"] != want["recency"], "the budget is too large to tell"
    for router in ("recency", "sketch"):
        with attach(model, routed(router=router)):
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda ids: run(model, ids), [prompt(70)] * 2))
            assert [out.sequences.tolist() for out in found] == [want[router]] * 2


def cut(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def after(real: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    return call


CUTS: dict[str, tuple[Any, str, Any]] = {
    "scores": (RowMemory, "fill", after(RowMemory.fill)),
    "selection": (RoutedPolicy, "select", after(RoutedPolicy.select)),
    "a layer": (RoutedPolicy, "saw", after(RoutedPolicy.saw)),
    "repairs": (RoutedPolicy, "missed", after(RoutedPolicy.missed)),
    "commit begins": (RoutedPolicy, "commit", cut),
    "a row is noted": (RowMemory, "note", after(RowMemory.note)),
    "a summary": (KeyBook, "_room", after(KeyBook._room)),  # in a forward that fills a page
    "summaries": (KeyBook, "refresh", after(KeyBook.refresh)),
    "commit ends": (RoutedPolicy, "commit", after(RoutedPolicy.commit)),
}


@pytest.mark.parametrize("tiers", [None, TIERS], ids=["resident", "tiered"])
@torch.no_grad()
def test_a_forward_cut_off_leaves_no_trace(tiers: Any, trained: str) -> None:
    model, ids, text = shared("llama"), prompt(70), prompt(2 * len(CUTS), seed=5)
    config = routed("guarded", tiers, router=trained, coverage=0.5)
    cuts = iter(CUTS.values())
    with attach(model, config) as oval:
        calm, troubled = oval.new_cache(), oval.new_cache()
        for cache in (calm, troubled):
            model(ids, cache=cache)
        for step, token in enumerate(text.split(1, 1)):
            if step % 2:
                owner, name, broken = next(cuts)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(owner, name, broken)
                    with pytest.raises(KeyboardInterrupt):
                        model(token, cache=troubled)
                assert troubled.get_seq_length() == ids.shape[1] + step
            want = model(token, cache=calm).logits
            torch.testing.assert_close(
                model(token, cache=troubled).logits, want, atol=1e-5, rtol=1e-5
            )
        assert next(cuts, None) is None
        assert oval.stats()["routing"]["selections"] > 2 * text.shape[1]


@torch.no_grad()
def test_the_work_of_a_step_grows_with_the_pages_and_not_with_the_steps(trained: str) -> None:
    model = build("llama", max_position_embeddings=2048)
    work = []
    with attach(model, routed("guarded", router=trained)) as oval:
        cache = oval.new_cache(reserve_tokens=900)
        model(prompt(800), cache=cache)
        for step in range(64):
            calls = count_calls(lambda step=step: model(prompt(1, seed=step), cache=cache))
            work.append(calls / len(cache.paged.table.sequences[0].pages))
    early, late = sum(work[8:24]), sum(work[48:64])
    assert late < 1.03 * early


def count_calls(work: Callable[[], Any]) -> int:
    """Returns how many calls of functions some work makes: the same on every machine."""
    events = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(before)
    return len(events)

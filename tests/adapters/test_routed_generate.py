"""`generate` under the policies that select: all ways to call it, caches of many lives, and what a small budget computes."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_scenarios import CORE, MORE, check
from reference_masked import Forwards, recorded, replayed
from tiny_models import assert_same_run, build, one_thread, padded, prompt, run, shared
from transformers import PreTrainedModel

from oval_adapters import attach
from oval_adapters.routing.resolve import model_facts
from oval_core import OVALRouter
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.key_book import KeyBook
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.row_memory import RowMemory

_one_thread = pytest.fixture(autouse=True)(one_thread)

ALL = 100_000
SMALL = {"token_budget": 24, "window_size": 4, "num_sink_tokens": 2, "dense_layers": [0]}
TIERS = {"fast_tokens": 64, "sink_tokens": 2, "recent_tokens": 4}
GEMMA = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


def routed(policy: str = "routed", tiers: Any = None, **routing: Any) -> dict[str, Any]:
    return {"page_size": 4, "policy": policy, "routing": {**SMALL, **routing}, "tiers": tiers}


def router_for(model: PreTrainedModel, groups: int = 2, **changes: Any) -> OutputAwareRouter:
    """An untrained router, with weights that make it choose by all that it may know."""
    torch.manual_seed(3)
    size = model.config.hidden_size
    router = OutputAwareRouter(RouterConfig(hidden_size=size, num_groups=groups, **changes))
    for weight in router.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return router.eval()


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


@pytest.mark.parametrize("scenario", ["beams-padded", "sampling-many", "uneven-ends", "lookup"])
@pytest.mark.parametrize("router", ["recency", "sketch", "quest", "random", "trained"])
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
        assert_same_run(run(model, prompt(60), **settings), run(model, prompt(60), use_oval=False, max_new_tokens=20))
        assert draft.stats()["routing"]["selections"] > 5
    with attach(model, routed()) as oval:
        assert run(model, prompt(60), **settings).sequences.shape[1] == 80
        assert oval.stats()["routing"]["selections"] > 3


@pytest.mark.parametrize("router", ["sketch", "persistence"])
@pytest.mark.parametrize("chunk", [8, 16, 40, 89])
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


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("router", ["sketch", "quest", "trained"])
def test_tiers_change_no_token(
    router: str, policy: str, where: str, tmp_path: Path, trained: str
) -> None:
    model = shared("llama")
    config = routed(policy, router=trained if router == "trained" else router, coverage=0.5)
    place = {} if where == "host" else {"disk": str(tmp_path)}
    for call in ({"inputs": prompt(150)}, {**padded([90, 61]), "num_beams": 2}):
        with attach(model, config):
            want = run(model, **call)
        with attach(model, {**config, "tiers": {**TIERS, "fast_tokens": 100, **place}}) as oval:
            got = run(model, **call)
            assert_same_run(got, want)
            assert oval.stats()["routing"]["selections"] > 5
            del got
            moved = oval.stats()["tiers"]
    assert moved["bytes_used"] + moved["bytes_wasted"] == moved["bytes_prefetched"]
    assert moved["bytes_stored"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("router", ["sketch", "quest", "trained", "recency"])
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


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@torch.no_grad()
def test_decoding_keeps_a_fixed_number_of_tensors_and_bytes_by_length(policy: str) -> None:
    model, sizes = shared("llama"), []
    with attach(model, routed(policy, router="sketch")) as oval:
        cache = oval.new_cache(reserve_tokens=320)
        model(prompt(100), cache=cache)
        for step in range(201):
            model(prompt(1, seed=step), cache=cache)
            if step in (20, 110, 200):
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


@pytest.mark.parametrize("router", ["sketch", "persistence", "trained"])
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
            found: list[Any] = []
            threads = [threading.Thread(target=lambda: found.append(run(model, prompt(70)))) for _ in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
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
    "a summary": (KeyBook, "_room", after(KeyBook._room)),
    "summaries": (KeyBook, "refresh", after(KeyBook.refresh)),
    "commit ends": (RoutedPolicy, "commit", after(RoutedPolicy.commit)),
}


@pytest.mark.parametrize("tiers", [None, TIERS], ids=["resident", "tiered"])
@pytest.mark.parametrize("place", CUTS)
@torch.no_grad()
def test_a_forward_cut_off_leaves_no_trace(place: str, tiers: Any, trained: str) -> None:
    model, ids, text = shared("llama"), prompt(83), prompt(16, seed=5)
    owner, name, broken = CUTS[place]

    def steps(at: int | None) -> Iterator[torch.Tensor]:
        cache = oval.new_cache()
        model(ids, cache=cache)
        for step in range(text.shape[1]):
            token = text[:, step : step + 1]
            if step == at:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(owner, name, broken)
                    model(token, cache=cache)
                assert cache.get_seq_length() == 83 + step
            yield model(token, cache=cache).logits

    with attach(model, routed("guarded", tiers, router=trained, coverage=0.5)) as oval:
        calm, troubled = list(steps(None)), list(steps(4))  # the 88th token fills a page
        assert oval.stats()["routing"]["selections"] > 30
    torch.testing.assert_close(torch.stack(troubled), torch.stack(calm), atol=1e-5, rtol=1e-5)


def test_a_router_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    model = shared("llama")
    size = model.config.hidden_size
    with attach(model, routed(router="recency")):
        plain, random = run(model, prompt(70)), OVALRouter(size, 40)
        assert_same_run(run(model, prompt(70), oval_router=random.eval()), run(model, prompt(70), oval_router=random))
        mine = run(model, prompt(70), oval_router=router_for(model))
        assert mine.sequences.tolist() != plain.sequences.tolist()
        assert caplog.text == ""
        run(model, prompt(70), oval_router=random.train())
        assert "training mode" in caplog.text
        more = torch.cat([plain.sequences, prompt(3)], 1)
        run(model, more, cache=plain.cache, oval_router=random.eval())
        assert "the call brings a cache" in caplog.text


class Odd:
    """A router that is wrong in one way."""

    name, lead, needs = "odd", "step", frozenset()

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def score(self, view: Any) -> torch.Tensor:
        """Returns one score for all."""
        return torch.zeros(1)


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (lambda m: Odd(), r"'odd' gave scores \[1\]. Allowed: 2 selections x 18 pages"),
    "needs": (lambda m: Odd(needs=["hidden"]), r"needs \['hidden'\]. Allowed: a set"),
    "unknown need": (lambda m: Odd(needs={"hiden"}), "no cache knows it"),
    "lead": (lambda m: Odd(lead="soon"), "lead 'soon'.*Allowed: lead 'step', or 'layer'"),
    "by layer": (lambda m: Odd(lead="layer"), "'layer' with a signal"),
    "article": (lambda m: OVALRouter(32, 40).eval(), "hidden size 32. Allowed with this model: 48"),
    "groups": (lambda m: router_for(m, groups=3), "makes 2 with dense_layers.*this router: 3"),
    "recording": (lambda m: router_for(m, signals=["infllm"]), "while a model decodes"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_of_the_call_is_named(wrong: str) -> None:
    model = shared("llama")
    make, message = WRONG[wrong]
    with attach(model, routed(router="sketch")):
        with pytest.raises(ConfigError, match=message):
            run(model, prompt(70), oval_router=make(model))
        assert run(model, prompt(70)).sequences.shape[1] == 82


def test_groups_are_those_of_layers_without_a_window(tmp_path: Path) -> None:
    model = build("gemma3", num_hidden_layers=4, layer_types=GEMMA)
    for groups in (2, 3):
        save_router(tmp_path / str(groups), TrainedRouter(router=router_for(model, groups)))
    with attach(model, routed(router=str(tmp_path / "2"), dense_layers=[])) as oval:
        run(model, prompt(70))
        assert oval.stats()["routing"]["selections"] == 11
    with pytest.raises(ConfigError, match="got 3, which makes 2 .*Allowed with this router: 3"):
        attach(model, routed(router=str(tmp_path / "3"), dense_layers=[]))


def test_routers_of_other_models_are_refused(tmp_path: Path) -> None:
    model, other = shared("llama"), shared("qwen3")
    save_router(tmp_path / "a", TrainedRouter(router=router_for(model), model=model_facts(other.config)))
    with pytest.raises(ConfigError, match="was trained for .*qwen3.*Got .*llama.*Allowed"):
        attach(model, routed(router=str(tmp_path / "a")))
    unsaid = OutputAwareRouter(RouterConfig(hidden_size=32, num_groups=2))
    save_router(tmp_path / "b", TrainedRouter(router=unsaid))
    with pytest.raises(ConfigError, match="hidden size 32. Allowed with this model: 48"):
        attach(model, routed(router=str(tmp_path / "b")))
    attach(model).detach()


SETTINGS: dict[str, tuple[Any, str]] = {
    "share 0": ({"budget_share": 0}, "budget_share: got 0. Allowed: above 0, up to 1"),
    "share 1.5": ({"budget_share": 1.5}, "budget_share: got 1.5"),
    "share text": ({"budget_share": "20%"}, "budget_share: got '20%'"),
    "budget 0": ({"token_budget": 0}, "token_budget: got 0. Allowed: 1 or more"),
    "lead 0": ({"lead": 0}, "lead: got 0"),
    "audits": ({"audit_every": 0}, "audit_every: got 0"),
    "typo": ({"rooter": "sketch"}, "'routing.rooter': did you mean 'router'"),
    "router": ({"router": "skecth"}, "did you mean 'sketch'.*Or the folder"),
    "folder": ({"router": "no/such"}, "oval_config.json cannot be read.*Allowed: a folder"),
    "measured only": ({"router": "oracle_mass"}, "no cache knows it.*Allowed"),
    "all dense": ({"dense_layers": [0, 1, 2]}, r"dense_layers: got \[0, 1, 2\] for 3 .*Allowed"),
    "no such layer": ({"dense_layers": [3]}, r"dense_layers: got \[3\]"),
}


@pytest.mark.parametrize("wrong", SETTINGS)
def test_wrong_settings_are_refused_by_attach(wrong: str) -> None:
    model = shared("llama")
    settings, message = SETTINGS[wrong]
    with pytest.raises(ConfigError, match=message) as caught:
        attach(model, routed(**settings))
    assert "oracle_mass, " not in str(caught.value), "a name is suggested that cannot decode"
    attach(model).detach()


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"budget_share": 1}, None, None),
        ({"token_budget": 1}, 6, 12),  # sinks and window are read in any case, in whole pages
        ({"lead": 100}, 6, 24),
        ({"window_size": ALL}, ALL, ALL),
        ({"layer_groups": ALL}, 6, 24),
        ({"token_budget": 8, "budget_share": 0.5}, 30, 50),  # the share is in place of the tokens
    ],
)
def test_settings_at_their_limits(
    settings: dict[str, Any], least: int | None, most: int | None
) -> None:
    model = shared("llama")
    with attach(model, routed(router="sketch", **settings)) as oval:
        assert run(model, prompt(70)).sequences.shape[1] == 82
        stats = oval.stats()["routing"]
    if least is None:
        assert (stats["selections"], stats["read_share"]) == (0, None)
    else:
        mean = stats["tokens_read"] / stats["selections"] / 2  # layers
        length = stats["tokens_present"] / stats["selections"] / 2
        assert min(least, length) <= mean <= min(most, length)


def test_the_shipped_configuration() -> None:
    model = build("llama", num_hidden_layers=4)
    with attach(model, "routed") as oval:
        run(model, prompt(500), max_new_tokens=4)
        stats = oval.stats()["routing"]
    assert (stats["router"], stats["budget_share"], stats["selections"]) == ("sketch", 0.2, 3)
    assert 0.15 < stats["read_share"] <= 0.2

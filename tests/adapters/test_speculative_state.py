"""What a call leaves behind: in the cache where it is cut short, and in what calls of two threads would share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from reference_speculative import ScriptedDrafter
from tiny_models import VOCAB, one_thread, prompt, shared

from oval_adapters import attach
from oval_adapters.speculative import speculative as home
from oval_core.config import OvalConfig
from oval_spec.drafter import Draft, DraftRequest

_one_thread = pytest.fixture(autouse=True)(one_thread)


def test_a_prompt_that_is_cut_short_leaves_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page fusion takes over who looks ahead for pages, which plain decoding needs again."""
    model, ids = shared("llama"), prompt(24)
    config = {
        "page_size": 4,
        "policy": "routed",
        "routing": {"token_budget": 12, "router": "recency", "dense_layers": ()},
        "tiers": {"fast_tokens": 64, "sink_tokens": 2, "recent_tokens": 4},
    }

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with attach(model, OvalConfig.from_dict(config)) as oval:
        cache = oval.new_cache()
        with monkeypatch.context() as patch:
            patch.setattr(home, "read_prompt", stop)
            with pytest.raises(KeyboardInterrupt):
                model.generate(
                    ids,
                    cache=cache,
                    max_new_tokens=4,
                    do_sample=False,
                    custom_generate=oval.speculative,
                    speculation={"drafter": "ngram", "fusion": "draft"},
                )
        assert cache.paged.foresees
        assert not oval.speculative._running


def test_calls_in_two_threads_share_no_clock_and_every_step_is_counted() -> None:
    model, ids, seen = shared("llama"), prompt(10), []
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    meet = threading.Barrier(2, timeout=60)

    class Meeting(ScriptedDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            meet.wait()
            return super().draft(requests)

    with attach(model) as oval:

        def decode() -> None:
            out = model.generate(
                ids,
                max_new_tokens=20,
                do_sample=False,
                custom_generate=oval.speculative,
                oval_drafter=Meeting({}, "wrong", VOCAB),
                speculation={"turns_off": False, "max_nodes": 12},
            )
            seen.append(out.tolist())

        lent = {id(costs) for costs in _costs_seen(decode)}
        stats = oval.stats()["speculation"]
    assert seen == [want.tolist()] * 2
    assert len(lent) == 2
    assert stats["emitted"] == stats["steps"] == 2 * 19


def _costs_seen(decode: Callable[[], None]) -> list[Any]:
    """Runs a call in two threads at once; returns the costs that they were lent."""
    lent, real = [], home.Pace

    def noted(made: Any, config: Any, costs: Any, *rest: Any) -> Any:
        lent.append(costs)
        return real(made, config, costs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "Pace", noted)
        threads = [threading.Thread(target=decode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return lent

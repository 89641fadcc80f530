"""Ctrl-C at the worst moment: a forward counts whole or not at all, and the model stays usable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import one_thread, padded, prompt, shared

from oval_adapters import attach
from oval_adapters.attention_switch import AttentionSwitch
from oval_adapters.columns import ColumnMap
from oval_adapters.hf_cache import OvalCache
from oval_adapters.interrupts import hold_interrupts
from oval_core.errors import TierError
from oval_core.page_table import PageTable
from oval_core.paged_cache import PagedCache
from oval_core.tiers.slow_tier import SlowTier

_one_thread = pytest.fixture(autouse=True)(one_thread)

TIERED = {"page_size": 2, "tiers": {"fast_tokens": 64}}


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts what runs in the background with Ctrl-C ignored; the tests press it all the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def then(real: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        after()
        return result

    return call


def cut() -> None:
    raise KeyboardInterrupt


CUTS = {
    "columns not told": (ColumnMap, "commit", lambda *_: cut()),
    "between pages and columns": (PagedCache, "commit", then(PagedCache.commit, cut)),
    "after the first row": (PageTable, "commit", then(PageTable.commit, cut)),
    "signal in a row": (PageTable, "commit", then(PageTable.commit, press_ctrl_c)),
    "signal while planning": (PageTable, "append", then(PageTable.append, press_ctrl_c)),
    "signal in the commit": (OvalCache, "commit", then(OvalCache.commit, press_ctrl_c)),
}


@pytest.mark.parametrize("config", [{}, TIERED], ids=["resident", "tiered"])
@pytest.mark.parametrize("place", CUTS)
@torch.no_grad()
def test_a_forward_cut_off_counts_whole_or_not_at_all(place: str, config: dict[str, Any]) -> None:
    model, batch = shared("llama"), padded([90, 61])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    more = prompt(7, batch=2, seed=3)
    with attach(model, config) as oval:
        cache = oval.new_cache()
        model(ids, attention_mask=mask, cache=cache)
        owner, name, broken = CUTS[place]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(KeyboardInterrupt):
                model(more[:, :1], cache=cache)
        length = cache.get_seq_length()
        assert length in (90, 91)
        got = model(more[:, length - 90 :], cache=cache).logits[:, -1]
        assert [seq.length for seq in cache.paged.table.sequences] == [97, 68]
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    want = model(torch.cat([ids, more], 1), attention_mask=whole).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_crop_that_fails_is_made_before_the_next_use() -> None:
    model, ids = shared("llama"), prompt(100)
    with attach(model, TIERED) as oval:
        cache = oval.new_cache()
        model(ids, cache=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                SlowTier, "read_page", lambda *_: (_ for _ in ()).throw(TierError("gone"))
            )
            with pytest.raises(TierError, match="gone"):
                cache.crop(-59)
        got = model(prompt(5, seed=2), cache=cache).logits[:, -1]
    want = model(torch.cat([ids[:, :41], prompt(5, seed=2)], 1)).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_attention_is_the_models_own_after_every_interrupt() -> None:
    model, ids = shared("llama"), prompt(20)
    want, before = model(ids).logits, model.config._attn_implementation
    for method in ("oval", "plain"):
        oval = attach(model)
        real = getattr(AttentionSwitch, method)

        def switch(self: AttentionSwitch, real: Any = real) -> Any:
            press_ctrl_c()
            return real(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AttentionSwitch, method, switch)
            with pytest.raises(KeyboardInterrupt):
                model(ids, cache=oval.new_cache() if method == "oval" else None)
        found = elsewhere(model, ids)
        assert torch.equal(found[0], want), "a plain forward waits for one that was cut off"
        oval.detach()
        assert model.config._attn_implementation == before
        assert torch.equal(model(ids).logits, want)


def elsewhere(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a plain forward in another thread; none if it does not end."""
    found: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10.0)
    return found


@torch.no_grad()
def test_detach_puts_the_attention_back_wherever_a_forward_was_cut_off() -> None:
    model, ids = shared("llama"), prompt(20)
    want = model(ids).logits
    oval = attach(model)
    oval._switch.oval().__enter__()  # never left, as if cut off on the way out
    oval.detach()
    assert torch.equal(model(ids).logits, want)


def test_an_interrupt_that_is_held_back_comes_at_the_end() -> None:
    reached = []
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with hold_interrupts():
            press_ctrl_c()
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is before
    with hold_interrupts():
        pass_through = signal.getsignal(signal.SIGINT)
    assert pass_through is not before
    assert signal.getsignal(signal.SIGINT) is before

"""Replays: what a router is shown at each step, what it may read, and that the loop is closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from core.toy_recording import toy_recording
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_core.routing.recording import Recording
from oval_core.routing.replay import (
    ReplayOptions,
    heaviest,
    kept_pages,
    oracle_selections,
    replay,
    replay_many,
)
from oval_core.routing.rivals import BySignal, Persistence, Random
from oval_core.routing.router import Lead
from oval_core.routing.view import EPS, PageHistory, PageView

NAMES = [f.name for f in fields(PageHistory)]
OPEN = ReplayOptions(budget=24, num_sink_tokens=2, window_size=6, loop="open")
CLOSED = ReplayOptions(budget=24, num_sink_tokens=2, window_size=6)


class Watcher:
    """Scores by persistence and keeps every view that it was shown."""

    name = "watcher"

    def __init__(self, *needs: str, lead: Lead = "step") -> None:
        self.needs = frozenset(needs)
        self.lead: Lead = lead
        self.views: list[PageView] = []

    def score(self, view: PageView) -> torch.Tensor:
        self.views.append(view)
        return (view.history.last + EPS).log()


def kept_by_hand(recording: Recording, step: int, options: ReplayOptions) -> list[bool]:
    committed = recording.context + step
    always = {*range(options.num_sink_tokens), committed}
    always |= set(range(committed - options.window_size, committed))
    bounds = zip(recording.starts.tolist(), recording.counts.tolist(), strict=True)
    return [any(t in always for t in range(s, s + n)) for s, n in bounds]


def test_kept_pages_hold_the_first_tokens_the_last_ones_and_the_own() -> None:
    recording = toy_recording()
    kept = kept_pages(recording, 2, 6)
    for step in range(recording.num_steps):
        assert kept[step].tolist() == kept_by_hand(recording, step, CLOSED)


@given(
    st.integers(0, 5),
    st.sampled_from(["open", "closed"]),
    st.sampled_from([1, 3]),
    st.integers(24, 60) | st.floats(0.5, 1.0),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_selections_obey_the_rules(
    seed: int, loop: str, lead: int, budget: int | float, is_late: bool
) -> None:
    recording = toy_recording(seed)
    options = ReplayOptions(budget=budget, lead=lead, num_sink_tokens=2, window_size=6, loop=loop)
    router = BySignal("quest", "quest", "layer") if is_late else Random(seed)
    selections = replay(recording, router, options)
    committed = recording.committed()
    for step in range(recording.num_steps):
        kept = torch.tensor(kept_by_hand(recording, step, options))
        length = recording.context + step
        limit = budget if isinstance(budget, int) else -int(-budget * length // 1)
        for group in range(2):
            chosen = selections[step, group]
            assert chosen[kept].all()
            assert not chosen[recording.starts > length].any()
            tokens = int(committed[step, chosen].sum())
            if is_late or step % lead == 0:  # the tokens to come while it stands have their room
                assert tokens <= limit - (0 if is_late else lead - 1)
            # a free page that would still fit is not left out
            free = ~chosen & (committed[step] > 0)
            if (lead == 1 or is_late) and free.any():
                assert int(committed[step, free].min()) > limit - tokens
        if not is_late and step % lead:
            new = selections[step] & ~selections[step - 1]
            assert not new[:, ~kept].any(), "a selection stands for `lead` steps"


@pytest.mark.parametrize("lead", [1, 4])
def test_a_budget_that_kept_pages_exceed_adds_none(lead: int) -> None:
    recording = toy_recording(sizes=[4] * 14, context=48)
    options = ReplayOptions(budget=3, lead=lead, num_sink_tokens=2, window_size=6)
    selections = replay(recording, Persistence(), options)
    for step in range(0, recording.num_steps, lead):
        kept = kept_by_hand(recording, step, options)
        assert selections[step].tolist() == [kept, kept]


def test_a_view_shows_what_is_known_before_the_step() -> None:
    recording = toy_recording()
    router = Watcher("hidden", "page_hidden", "quest", "h2o")
    replay(recording, router, OPEN)
    for step, view in enumerate(router.views):
        length = recording.context + step
        assert view.length == length
        assert view.lead == 1
        pages = len(view.starts)
        bounds = zip(view.starts.tolist(), view.counts.tolist(), strict=True)
        assert [t for s, n in bounds for t in range(s, s + n)] == list(range(length))
        assert view.hidden is not None
        assert torch.equal(view.hidden[0], recording.hidden[step])
        assert view.page_hidden is not None
        assert torch.equal(view.page_hidden[0, :-1], recording.page_hidden[: pages - 1])
        assert torch.equal(view.page_hidden[0, -1], recording.newest_hidden[step])
        assert torch.equal(view.signals["quest"][0], recording.signals["quest"][step, :, :pages])
        torch.testing.assert_close(
            view.signals["h2o"][0].exp(), recording.h2o[:, :pages] + EPS, atol=1e-6, rtol=1e-5
        )
        for name in NAMES:
            assert getattr(view.history, name).shape == (1, 2, pages)


def test_a_router_by_layer_sees_the_query_of_the_step_and_chooses_at_each() -> None:
    recording = toy_recording()
    options = ReplayOptions(budget=24, lead=5, num_sink_tokens=2, window_size=6)
    router = Watcher("quest", "oracle_output", lead="layer")
    replay(recording, router, options)
    assert len(router.views) == recording.num_steps
    assert router.views[0].lead == 5
    for step, view in enumerate(router.views):
        pages = len(view.starts)
        quest = recording.signals["quest"][step + 1, :, :pages]
        assert torch.equal(view.signals["quest"][0], quest)
        effect = recording.effect[step, :, :pages]
        torch.testing.assert_close(view.signals["oracle_output"][0].exp(), effect + EPS)


def history_by_hand(recording: Recording, selections: torch.Tensor, loop: str) -> list[PageHistory]:
    """What was known before each step, page by page."""
    history, found = recording.prompt_history, []
    for step in range(recording.num_steps):
        found.append(history)
        read = selections[step].clone()
        if loop == "open":
            read[:] = recording.starts <= recording.context + step
        mass, peak = torch.zeros_like(recording.mass[0]), torch.zeros_like(recording.mass[0])
        for group in range(2):
            pages = read[group].nonzero()[:, 0].tolist()
            total = sum(float(recording.mass[step, group, p]) for p in pages)
            for p in pages:
                mass[group, p] = recording.mass[step, group, p] / total
                peak[group, p] = min(1.0, float(recording.peak[step, group, p]) / total)
        history = history.observe(mass, peak, read)
    return found


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_the_loop_shows_only_what_was_read(loop: str) -> None:
    recording = toy_recording()
    options = ReplayOptions(budget=24, num_sink_tokens=2, window_size=6, loop=loop)
    done = replay_many([recording], Persistence(), options, with_histories=True)
    want = history_by_hand(recording, done.selections[0], loop)
    assert done.histories is not None
    for name in NAMES:
        got = getattr(done.histories, name)[0]
        hand = torch.stack([getattr(history, name) for history in want])
        torch.testing.assert_close(got, hand, atol=1e-5, rtol=1e-4)


def test_a_closed_loop_misses_what_an_open_one_finds() -> None:
    recording = toy_recording(jump=True)
    options = {"budget": 24, "num_sink_tokens": 2, "window_size": 6}
    found = replay(recording, Persistence(), ReplayOptions(loop="open", **options))
    missed = replay(recording, Persistence(), ReplayOptions(**options))
    assert found[6:, :, 3].all(), "the mass jumped to page 3 at step 5"
    assert not missed[6:, :, 3].any()


def test_the_oracle_covers_most() -> None:
    recording = toy_recording()
    best = oracle_selections(recording, CLOSED)
    covered = (recording.mass * best).sum()
    for seed in range(5):
        assert covered > (recording.mass * replay(recording, Random(seed), CLOSED)).sum()
    # equal pages and no rest: the kept ones and the heaviest others, by hand
    recording = toy_recording(sizes=[4] * 14, context=48)
    best = oracle_selections(recording, CLOSED)
    for step in range(recording.num_steps):
        kept = kept_by_hand(recording, step, CLOSED)
        room = 24 - sum(int(n) for n, k in zip(recording.committed()[step], kept, strict=True) if k)
        for group in range(2):
            others = [p for p in range(14) if not kept[p] and recording.starts[p] < 48 + step]
            others.sort(key=lambda p: -float(recording.mass[step, group, p]))
            want = {p for p in range(14) if kept[p]} | set(others[: room // 4])
            assert set(best[step, group].nonzero()[:, 0].tolist()) == want


def test_several_passages_at_once_are_each_alone() -> None:
    recordings = [toy_recording(seed) for seed in range(3)]
    routers: list[Callable[[], object]] = [
        Persistence,
        lambda: BySignal("quest", "quest", "layer"),
        lambda: Watcher("graph", "hidden", "page_hidden", "quest"),
    ]
    for create in routers:
        together = replay_many(recordings, create(), CLOSED).selections
        for i, recording in enumerate(recordings):
            assert torch.equal(together[i], replay(recording, create(), CLOSED))


def test_the_graph_is_of_pages_that_were_read_together() -> None:
    router = Watcher("graph")
    recording = toy_recording(sizes=[4] * 20, context=60, steps=20, prompt_window=95)
    replay(recording, router, CLOSED)
    assert heaviest(torch.tensor([[0.1, 0.0, 0.3], [0.2, 0.0, 0.1]])) == [2, 0]
    first, last = router.views[0].graph, router.views[-1].graph
    assert first is not None
    assert last is not None
    assert first.to_dense().equal(torch.eye(15)), "the first rebuild is after 100 steps"
    assert last.shape == (20, 20)
    assert (last.to_dense() > 0).sum() > 20


@pytest.mark.parametrize("explore", [0.5, 1.0])
def test_exploration_draws_pages_within_the_budget(explore: float) -> None:
    recording = toy_recording(sizes=[4] * 14, context=48)
    draws = [
        replay_many(
            [recording],
            Persistence(),
            OPEN,
            explore=explore,
            generator=torch.Generator().manual_seed(seed),
        ).selections[0]
        for seed in (0, 0, 1)
    ]
    plain = replay(recording, Persistence(), OPEN)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    committed = recording.committed()
    for selections in draws:
        assert not torch.equal(selections, plain)
        assert ((selections * committed[:, None]).sum(-1) <= 24).all()
        assert (selections.sum(-1) == plain.sum(-1)).all(), "the budget is used up"


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "budget": (lambda: ReplayOptions(budget=0), "budget"),
    "share": (lambda: ReplayOptions(budget=1.5), "budget"),
    "lead": (lambda: ReplayOptions(budget=8, lead=0), "lead"),
    "window": (lambda: ReplayOptions(budget=8, window_size=0), "window_size"),
    "loop": (lambda: ReplayOptions(budget=8, loop="ajar"), "ajar"),
    "none": (lambda: replay_many([], Persistence(), OPEN), "got none"),
    "shapes": (
        lambda: replay_many([toy_recording(), toy_recording(context=40)], Persistence(), OPEN),
        "equal shape",
    ),
    "needs": (lambda: replay(toy_recording(), Watcher("arkvale"), OPEN), "arkvale"),
    "explore": (
        lambda: replay_many([toy_recording()], Persistence(), OPEN, explore=2.0),
        "explore",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        call()

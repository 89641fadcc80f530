"""The rivals' formulas, page by page, from a history that is fed in plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from oval_core.routing.registry import rivals_by_name
from oval_core.routing.view import PageHistory, PageView

GROUPS, PAGES, STEPS = 2, 6, 7


def made() -> tuple[PageView, list[torch.Tensor], list[torch.Tensor]]:
    """A view after seven steps, their masses and what they read."""
    history, masses, reads = PageHistory.empty(GROUPS, PAGES), [], []
    for _ in range(STEPS):
        masses.append(torch.rand(GROUPS, PAGES) / PAGES)
        reads.append(torch.rand(GROUPS, PAGES) < 0.6)
        reads[-1][:, 5] = False  # nobody ever reads the last one
        history = history.observe(masses[-1], masses[-1], reads[-1])
    counts = torch.tensor([4, 4, 2, 8, 4, 1])
    view = PageView(counts.cumsum(0) - counts, counts, 23, history)
    return view, masses, reads


def of_page(name: str, seen: list[tuple[float, bool]]) -> float:
    """The score of one page of one group, from (mass, read) of every step."""
    got = [mass for mass, read in seen if read]
    if name == "persistence":
        return math.log((got[-1] if got else 0.0) + 1e-7)
    if name == "ema":
        value = got[0] if got else 0.0
        for mass in got[1:]:
            value = 0.7 * value + 0.3 * mass
        return math.log(value + 1e-7)
    if name == "h2o":
        return math.log((sum(got) / len(got) if got else 0.0) + 1e-7)
    chosen = 0.0
    for _, read in seen:
        chosen = 0.9 * chosen + 0.1 * read
    last = got[-1] if got else 0.0
    return math.log(chosen + 1e-7) + 1e-3 * math.log(last + 1e-7)


@pytest.mark.parametrize("name", ["persistence", "ema", "h2o", "prr"])
def test_what_depends_on_a_page_alone(name: str) -> None:
    view, masses, reads = made()
    scores = rivals_by_name()[name].score(view)
    for group in range(GROUPS):
        for page in range(PAGES):
            seen = [
                (float(m[group, page]), bool(r[group, page]))
                for m, r in zip(masses, reads, strict=True)
            ]
            assert float(scores[group, page]) == pytest.approx(of_page(name, seen), abs=1e-5)


def test_tova_is_one_set_for_all_layers() -> None:
    view, _, _ = made()
    scores = rivals_by_name()["tova"].score(view)
    want = (view.history.last.mean(0) + 1e-7).log()
    assert torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[0], want)


def test_recency_is_the_distance() -> None:
    view, _, _ = made()
    scores = rivals_by_name()["recency"].score(view)
    assert scores.shape == (GROUPS, PAGES)
    ends = [4, 8, 10, 18, 22, 23]
    torch.testing.assert_close(scores[0], torch.tensor([-(23 - end) / 1000 for end in ends]))


def test_chance_is_by_seed_and_length_and_nothing_else() -> None:
    view, _, _ = made()
    one, two = rivals_by_name()["random"], rivals_by_name()["random"]
    first = one.score(view)
    assert torch.equal(first, one.score(view))
    assert torch.equal(first, two.score(view))
    later = PageView(view.starts, view.counts, 24, view.history)
    assert not torch.equal(first, one.score(later))
    assert not torch.equal(first, type(one)(seed=1).score(view))


def test_snapkv_is_never_renewed() -> None:
    view, _, _ = made()
    signal = torch.randn(1, PAGES)
    view = PageView(view.starts, view.counts, 23, view.history, signals={"snapkv": signal})
    assert torch.equal(rivals_by_name()["snapkv"].score(view), signal.expand(GROUPS, PAGES))


def test_the_slow_average_the_peak_and_the_age() -> None:
    _, masses, reads = made()
    history, peaks = PageHistory.empty(GROUPS, PAGES), [mass * 3 for mass in masses]
    for mass, peak, read in zip(masses, peaks, reads, strict=True):
        history = history.observe(mass, peak, read)
    for group in range(GROUPS):
        for page in range(PAGES):
            at = [i for i in range(STEPS) if reads[i][group, page]]
            slow = peak = 0.0
            for n, i in enumerate(at):
                keep_slow, keep_peak = (0.97, 0.7) if n else (0.0, 0.0)
                slow = keep_slow * slow + (1 - keep_slow) * float(masses[i][group, page])
                peak = keep_peak * peak + (1 - keep_peak) * float(peaks[i][group, page])
            assert float(history.slow[group, page]) == pytest.approx(slow, abs=1e-6)
            assert float(history.peak[group, page]) == pytest.approx(peak, abs=1e-6)
            assert int(history.age[group, page]) == (STEPS - 1 - at[-1] if at else STEPS)
            assert int(history.steps[group, page]) == len(at)

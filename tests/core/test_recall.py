"""Measures of a selection equal what counting page by page says."""

import math
from dataclasses import replace

import pytest
import torch
from core.toy_recording import toy_recording
from reference_recording import (
    reference_bytes,
    reference_output_error,
    reference_page_recall,
)

from oval_core.routing import recall
from oval_core.routing.recording import Recording
from oval_core.routing.replay import ReplayOptions, kept_pages, oracle_selections, replay
from oval_core.routing.rivals import Random

OPTIONS = ReplayOptions(budget=26, num_sink_tokens=2, window_size=5)


@pytest.fixture(params=range(3))
def recording(request: pytest.FixtureRequest) -> Recording:
    return toy_recording(request.param)


@pytest.fixture
def selections(recording: Recording) -> torch.Tensor:
    return replay(recording, Random(7), OPTIONS)


def covered_by_hand(recording: Recording, selections: torch.Tensor) -> list[float]:
    shares = []
    for step in range(recording.num_steps):
        for group in range(2):
            pages = selections[step, group].nonzero()[:, 0].tolist()
            shares.append(sum(float(recording.mass[step, group, p]) for p in pages))
    return shares


def test_mass_recall(recording: Recording, selections: torch.Tensor) -> None:
    shares = covered_by_hand(recording, selections)
    want = sum(shares) / len(shares)
    assert recall.mass_recall(recording, selections) == pytest.approx(want, abs=1e-6)
    everything = torch.ones_like(selections)
    assert recall.mass_recall(recording, everything) == pytest.approx(1.0)


def test_the_tenth_percentile(recording: Recording, selections: torch.Tensor) -> None:
    shares = sorted(covered_by_hand(recording, selections))
    place = 0.1 * (len(shares) - 1)
    low = shares[math.floor(place)]
    want = low + (place % 1) * (shares[math.ceil(place)] - low)
    assert recall.mass_recall_p10(recording, selections) == pytest.approx(want, abs=1e-6)


def test_recall_of_what_is_not_kept(recording: Recording, selections: torch.Tensor) -> None:
    kept = kept_pages(recording, 2, 5)
    shares = []
    for step in range(recording.num_steps):
        for group in range(2):
            mass = recording.mass[step, group]
            free = [p for p in range(len(mass)) if not kept[step, p]]
            got = sum(float(mass[p]) for p in free if selections[step, group, p])
            shares.append(got / sum(float(mass[p]) for p in free))
    got = recall.mass_recall_excluding_kept(recording, selections, kept)
    assert got == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    only_kept = kept[:, None].expand_as(selections)
    assert recall.mass_recall_excluding_kept(recording, only_kept, kept) == 0.0


def test_page_recall(recording: Recording, selections: torch.Tensor) -> None:
    want = reference_page_recall(recording, selections)
    assert recall.page_recall(recording, selections) == pytest.approx(want, abs=1e-6)
    top = recording.mass.topk(4, dim=-1).indices
    best = torch.zeros_like(selections).scatter(-1, top, True)
    assert recall.page_recall(recording, best) == 1.0


def test_heavy_pages(recording: Recording, selections: torch.Tensor) -> None:
    heavy = [tuple(place) for place in (recording.mass >= 0.05).nonzero().tolist()]
    assert heavy
    want = sum(bool(selections[place]) for place in heavy) / len(heavy)
    assert recall.heavy_page_recall(recording, selections) == pytest.approx(want, abs=1e-6)
    assert math.isnan(recall.heavy_page_recall(recording, selections, threshold=1.1))


def test_output_error(recording: Recording, selections: torch.Tensor) -> None:
    want = reference_output_error(recording, selections)
    assert want > 0.01
    assert recall.output_error(recording, selections) == pytest.approx(want, rel=1e-4)
    everything = torch.ones_like(selections)
    assert recall.output_error(recording, everything) == pytest.approx(0.0, abs=1e-5)
    none = replace(recording, sampled=recording.sampled[:0])
    assert math.isnan(recall.output_error(none, selections))


def test_missed_effect(recording: Recording, selections: torch.Tensor) -> None:
    steps = []
    for step in range(recording.num_steps):
        for group in range(2):
            left_out = (~selections[step, group]).nonzero()[:, 0].tolist()
            steps.append(sum(float(recording.effect[step, group, p]) for p in left_out))
    want = sum(steps) / len(steps)
    assert recall.missed_effect(recording, selections) == pytest.approx(want, abs=1e-5)


def test_bytes_that_are_missed(recording: Recording, selections: torch.Tensor) -> None:
    oracle = oracle_selections(recording, OPTIONS)
    steps = [
        reference_bytes(recording, step, [oracle[step, g] & ~selections[step, g] for g in range(2)])
        for step in range(recording.num_steps)
    ]
    got = recall.miss_bytes_per_token(recording, selections, oracle)
    assert got == pytest.approx(sum(steps) / len(steps))
    assert got > 0
    assert recall.miss_bytes_per_token(recording, oracle, oracle) == 0.0


def test_bytes_that_are_new(recording: Recording, selections: torch.Tensor) -> None:
    steps = [
        reference_bytes(
            recording, step, [selections[step, g] & ~selections[step - 1, g] for g in range(2)]
        )
        for step in range(1, recording.num_steps)
    ]
    got = recall.new_bytes_per_token(recording, selections)
    assert got == pytest.approx(sum(steps) / len(steps))
    assert recall.new_bytes_per_token(recording, torch.ones_like(selections)) == 0.0
    assert math.isnan(recall.new_bytes_per_token(toy_recording(steps=1), selections[:1]))


def test_a_page_that_is_written_now_is_not_moved() -> None:
    recording = toy_recording()
    present = recording.exists()[:, None].expand(-1, 2, -1)
    assert (present[1:] & ~present[:-1]).any(), "pages begin during the steps"
    assert recall.new_bytes_per_token(recording, present) == 0.0

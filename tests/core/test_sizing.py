"""Every method of sizing: one contract, a partition always, the set mean, and the same rule for the open page."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sizing import all_partitions, partition_cost

from oval_core.config import SIZING_NAMES
from oval_core.errors import ConfigError
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.routing.sizing import Evidence, PageSizing, _cheapest_partition, create_sizing

WIDTH = 6


def create(name: str, page_size: int = 16) -> PageSizing:
    sizer = DynamicPageSizer(WIDTH)
    sizer.head.weight.data = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(3)) / 2
    return create_sizing(name, page_size, sizer)


def evidence(count: int, kind: str = "noise", seed: int = 0) -> Evidence:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        noise = torch.randn(*shape, generator=generator)
        return noise * {"zero": 0.0, "huge": 1e30}.get(kind, 1.0)

    topics = torch.randn(count // 9 + 1, 4, generator=generator).repeat_interleave(9, 0)[:count]
    attention = random(count).abs() ** 3 / max(count, 1)
    if kind == "constant":
        attention = torch.full((count,), 1e-3)
        topics = torch.ones(count, 4)
        return Evidence(count, torch.ones(count, WIDTH), topics.expand(2, 3, -1, -1), attention)
    if count and kind == "sink":
        attention[0] = 0.9
    keys = topics + random(2, 3, count, 4) / 4
    return Evidence(count, random(count, WIDTH), keys, attention)


def first(whole: Evidence, start: int, end: int) -> Evidence:
    assert whole.hidden is not None
    assert whole.keys is not None
    assert whole.attention is not None
    part = slice(start, end)
    return Evidence(
        end - start, whole.hidden[part], whole.keys[..., part, :], whole.attention[part]
    )


@pytest.mark.parametrize("name", SIZING_NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(0, 700)),
    page_size=st.integers(1, 32),
    kind=st.sampled_from(["noise", "constant", "zero", "huge", "sink"]),
)
def test_sizes_are_a_partition(name: str, count: int, page_size: int, kind: str) -> None:
    sizes = create(name, page_size).sizes(evidence(count, kind))
    assert sum(sizes) == count
    assert all(isinstance(size, int) and 1 <= size <= 32 for size in sizes)
    if kind != "huge":
        assert abs(len(sizes) - count / page_size) <= 2 + 0.06 * count / page_size


@pytest.mark.parametrize("name", SIZING_NAMES)
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_an_even_text_gets_equal_pages(name: str, page_size: int) -> None:
    sizes = create(name, page_size).sizes(evidence(300, "constant"))
    assert sizes[:-1] == [page_size] * (len(sizes) - 1)


@pytest.mark.parametrize("name", SIZING_NAMES)
def test_only_what_is_needed_is_read(name: str) -> None:
    sizing = create(name)
    assert sizing.name == name
    whole = evidence(200)
    alone = {what: getattr(whole, what) for what in sizing.needs}
    assert sizing.sizes(Evidence(200, **alone)) == sizing.sizes(whole)
    for what in sizing.needs:
        with pytest.raises(AssertionError, match=what):
            sizing.sizes(Evidence(200))


@pytest.mark.parametrize("name", SIZING_NAMES)
def test_pages_grown_token_by_token_are_as_long_as_those_of_the_prompt(name: str) -> None:
    sizing, whole = create(name), evidence(1200)
    gauge = sizing.gauge(whole)
    assert all(isinstance(number, float) for number in gauge)
    grown, start = [], 0
    for end in range(1, 1201):
        if sizing.is_tail_done(first(whole, start, end), gauge):
            grown.append(end - start)
            start = end
    assert max(grown) <= 32
    assert abs(len(grown) - 75) <= (25 if name == "key_similarity" else 8)
    if name == "fixed":
        assert grown == [16] * 75


@pytest.mark.parametrize("name", SIZING_NAMES)
def test_the_open_page_of_an_even_text_is_done_at_the_mean_size(name: str) -> None:
    sizing, whole = create(name), evidence(200, "constant")
    gauge = sizing.gauge(whole)
    done = [n for n in range(1, 33) if sizing.is_tail_done(first(whole, 0, n), gauge)]
    assert done[0] == (32 if name == "key_similarity" else 16)  # without a dip the room decides


@pytest.mark.parametrize("name", ["dynamic", "attention_entropy"])
def test_a_page_is_done_by_what_its_tokens_hold_not_by_how_many_they_are(name: str) -> None:
    sizing, whole = create(name), evidence(400)
    gauge = sizing.gauge(whole)
    lengths = set()
    for start in range(0, 360, 40):
        done = [
            n for n in range(1, 33) if sizing.is_tail_done(first(whole, start, start + n), gauge)
        ]
        lengths.add(done[0])
    assert len(lengths) > 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-3, 3), min_size=0, max_size=9),
    st.integers(1, 6),
    st.floats(-3, 3),
)
def test_the_partition_is_the_cheapest(steps: list[float], mean_size: int, price: float) -> None:
    count = len(steps) + 1
    sizes = _cheapest_partition(np.array(steps), count, mean_size, price)
    least = min(partition_cost(p, steps, mean_size, price) for p in all_partitions(count))
    assert partition_cost(sizes, steps, mean_size, price) == pytest.approx(least, abs=1e-9)


def test_pages_end_where_keys_change() -> None:
    lengths = [12, 20, 9, 25, 16, 14, 18, 30, 7, 9]
    topics = torch.eye(10).repeat_interleave(torch.tensor(lengths), 0)
    noise = torch.randn(3, 160, 10, generator=torch.Generator().manual_seed(0)) / 50
    sizes = create("key_similarity").sizes(Evidence(160, keys=topics + noise))
    assert sizes == lengths
    assert create("key_similarity").sizes(Evidence(160, keys=topics)) == lengths, "one head"


def test_the_open_page_is_done_behind_a_change_of_keys() -> None:
    topics = torch.eye(10).repeat_interleave(16, 0)[None]
    noise = torch.randn(1, 160, 10, generator=torch.Generator().manual_seed(0)) / 20
    sizing, whole = create("key_similarity"), Evidence(160, keys=topics + noise)
    gauge = sizing.gauge(whole)
    done = [
        n
        for n in range(1, 33)
        if sizing.is_tail_done(Evidence(n, keys=(topics + noise)[:, :n]), gauge)
    ]
    assert 17 in done, "the first token of the next topic is in the page already"
    assert len(done) <= 5


def test_tokens_that_much_attention_goes_to_get_short_pages() -> None:
    attention = torch.full((640,), 2e-4)
    attention[320:480] = 4e-3
    sizes = create("attention_entropy").sizes(Evidence(640, attention=attention))
    ends = list(accumulate(sizes))
    inside = [size for size, end in zip(sizes, ends, strict=True) if 340 <= end <= 480]
    outside = [size for size, end in zip(sizes, ends, strict=True) if end <= 320 or end > 512]
    assert max(inside) < min(outside[:-1])
    assert abs(len(sizes) - 40) <= 1
    shares = [float(torch.special.entr(a).sum()) for a in attention.split(sizes)]
    bounded = [s for s, size in zip(shares, sizes, strict=True) if size < 32]
    assert max(bounded[1:-1]) < 1.7 * min(bounded[1:-1])


def test_dynamic_pages_are_those_of_the_sizer_at_the_page_size() -> None:
    sizer = DynamicPageSizer(WIDTH, mean_size=32)
    whole = evidence(500)
    assert create_sizing("dynamic", 8, sizer).sizes(whole) == sizer.sizes(whole.hidden, 8)
    assert sizer.sizes(whole.hidden, 8) != sizer.sizes(whole.hidden)


@pytest.mark.parametrize(
    ("name", "page_size", "message"),
    [
        ("dynamc", 16, "did you mean 'dynamic'"),
        ("", 16, "Allowed: attention_entropy, dynamic, fixed, key_similarity"),
        ("dynamic", 16, "without a sizer"),
        ("fixed", 0, "page_size"),
        ("fixed", 33, "page_size"),
    ],
)
def test_bad_choices_are_refused(name: str, page_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_sizing(name, page_size)

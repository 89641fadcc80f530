"""Dynamic page sizes: always a partition, short where values are high, linear, and learned through the soft pages."""

from __future__ import annotations

import time
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sizing import reference_borders, reference_loss, reference_sinkhorn

from oval_core.errors import ConfigError
from oval_core.routing import page_sizer
from oval_core.routing.page_sizer import (
    OVERLAP,
    WINDOW,
    DynamicPageSizer,
    page_sizes,
    sizing_loss,
)

WIDTH = 8


def random_sizer(mean_size: int = 16, strength: float = 1.0, seed: int = 0) -> DynamicPageSizer:
    sizer = DynamicPageSizer(WIDTH, mean_size)
    generator = torch.Generator().manual_seed(seed)
    sizer.head.weight.data = strength * torch.randn(1, WIDTH, generator=generator)
    return sizer


def text(count: int, kind: str = "smooth", seed: int = 0) -> torch.Tensor:
    """Hidden states [count, WIDTH]; `smooth` ones change slowly, so that regions differ."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, WIDTH, generator=generator)
    if kind == "smooth":
        slow = torch.randn(count // 50 + 1, WIDTH, generator=generator)
        return noise / 4 + slow.repeat_interleave(50, 0)[:count]
    if kind == "constant":
        return torch.full((count, WIDTH), 0.3)
    if kind == "outlier":
        noise[count // 2 : count // 2 + 1] *= 1e4
    if kind == "broken":
        noise[::7, 0] = float("inf")
        noise[::11, 1] = float("nan")
    return noise * {"huge": 1e37, "tiny": 1e-37, "zero": 0.0}.get(kind, 1.0)


KINDS = ("smooth", "noise", "constant", "zero", "huge", "tiny", "outlier", "broken")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(440, 1100), st.integers(0, 3000)),
    kind=st.sampled_from(KINDS),
    mean_size=st.integers(1, 32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strength=st.sampled_from([0.0, 1.0, 50.0]),
)
def test_sizes_are_a_partition(
    count: int, kind: str, mean_size: int, dtype: torch.dtype, strength: float
) -> None:
    sizer = random_sizer(mean_size, strength)
    sizes = sizer(text(count, kind).to(dtype))
    assert sum(sizes) == count
    assert all(isinstance(size, int) and 1 <= size <= 32 for size in sizes)
    if strength < 50 and kind in ("smooth", "noise", "constant"):
        assert abs(len(sizes) - count / mean_size) <= 1.5 + 0.02 * len(sizes)


@pytest.mark.parametrize("mean_size", [1, 5, 16, 32])
@pytest.mark.parametrize("kind", ["constant", "zero"])
def test_a_text_without_differences_gets_equal_pages(kind: str, mean_size: int) -> None:
    sizes = random_sizer(mean_size)(text(1503, kind))
    assert sizes[:-1] == [mean_size] * (len(sizes) - 1)
    assert sizes[-1] == (1503 - 1) % mean_size + 1


@pytest.mark.parametrize("count", [100, 512, 1500])
@pytest.mark.parametrize("mean_size", [8, 16])
def test_pages_hold_equal_shares(count: int, mean_size: int) -> None:
    sizer, hidden = random_sizer(mean_size, 0.7), text(count)
    scaled = hidden / hidden.var(-1, correction=0).mean().sqrt()
    values = scaled @ sizer.head.weight[0] + 0.5 * scaled.var(-1, correction=0)
    expected = reference_borders(values.tolist(), mean_size)
    borders = [0, *accumulate(sizer(hidden))][:-1]
    assert len(set(map(len, (expected, borders)))) == 1
    gaps = [abs(a - b) for a, b in zip(expected, borders, strict=True)]
    assert max(gaps) <= 2, "soft pages blur a border by a token or two, not more"
    assert sum(gaps) <= 0.4 * len(gaps)


@pytest.mark.parametrize("count", [1, 300, 512])
def test_a_short_text_is_one_window(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizer, hidden = random_sizer(), text(count)
    windowed = sizer(hidden), sizer.soft_assign(hidden)
    monkeypatch.setattr(page_sizer, "WINDOW", 10**6)
    assert sizer(hidden) == windowed[0]
    assert torch.equal(sizer.soft_assign(hidden), windowed[1])


@pytest.mark.parametrize("count", [513, 960, 961, 2500])
def test_windows_change_next_to_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizer, hidden = random_sizer(), text(count)
    windowed, shares = sizer(hidden), sizer.soft_assign(hidden)
    monkeypatch.setattr(page_sizer, "WINDOW", 10**6)
    whole = sizer.soft_assign(hidden)
    assert list(accumulate(windowed)) == list(accumulate(sizer(hidden)))
    assert (shares - whole).abs().max().item() < 0.05


def test_soft_pages_do_not_jump_between_windows() -> None:
    count = 2000
    shares = random_sizer().soft_assign(text(count))
    assert torch.allclose(shares.sum(1), torch.ones(count), atol=1e-5)
    assert float(shares.detach().min()) >= 0
    where = shares.detach() @ torch.arange(shares.shape[1]).float()
    steps = where.diff()
    assert float(steps.min()) > -1e-3, "soft pages go forward"
    stride = WINDOW - OVERLAP
    seams = {t for start in range(0, count, stride) for t in (start - 1, start + OVERLAP - 1)}
    at_seams = [float(steps[t]) for t in seams if 0 <= t < count - 1]
    assert max(at_seams) <= float(steps.max()), "no step at a seam beyond those within windows"
    assert max(at_seams) < 0.5


def test_soft_and_hard_pages_agree() -> None:
    sizer, hidden = random_sizer(), text(1200)
    hard = torch.tensor(sizer(hidden)).repeat_interleave(torch.tensor(sizer(hidden)))
    page_of = sizer.soft_assign(hidden).argmax(1)
    _, counts = page_of.unique_consecutive(return_counts=True)
    assert len(counts) == len(sizer(hidden))
    assert float((counts.repeat_interleave(counts) - hard).abs().float().mean()) < 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40),
    st.integers(0, 40),
)
def test_sinkhorn_equals_scaling_in_turn(density: list[float], extra: int) -> None:
    positions = page_sizer.mass_positions(torch.tensor(density))
    least = torch.ones(int(positions[-1]) + 1 + extra // 20)
    least[:: 1 + extra % 3] = 0.0
    got = page_sizer._sinkhorn(positions, least)
    want = reference_sinkhorn(positions.tolist(), least.tolist(), 0.25, 5)
    assert torch.allclose(got, torch.tensor(want), atol=1e-4)


def test_a_page_that_tokens_crowd_into_is_emptied_up_to_its_bound() -> None:
    positions = torch.linspace(0.4, 0.6, 60)  # all nearest to page 0
    shares = page_sizer._sinkhorn(positions, torch.tensor([0.0, 1.0, 0.0]))
    free = torch.softmax(-(positions[:, None] - torch.arange(3) - 0.5).square() / 0.25, -1)
    assert float(free.sum(0)[0]) > 55
    assert float(shares.sum(0)[0]) < 50, "five rounds go most of the way to 32"


@pytest.mark.parametrize("by", ["variance", "head"])
def test_high_values_make_short_pages(by: str) -> None:
    hidden = text(1200, "noise")
    sizer = DynamicPageSizer(WIDTH)
    if by == "variance":
        hidden[400:800] *= 3
    else:
        hidden[:, 0] = 0
        hidden[400:800, 0] = 1
        sizer.head.weight.data[0, 0] = 1.5
    sizes = sizer(hidden)
    ends = list(accumulate(sizes))
    inside = [size for size, end in zip(sizes, ends, strict=True) if 432 <= end <= 800]
    outside = [size for size, end in zip(sizes, ends, strict=True) if end <= 400 or end > 832]
    assert max(inside) < min(outside[:-1])
    assert abs(len(sizes) - 75) <= 2, "what one region takes another gives"


def test_a_higher_value_never_lengthens_the_pages_of_its_region() -> None:
    hidden, lengths = text(1000, "noise"), []
    hidden[:, 0] = 0
    hidden[300:600, 0] = 1
    for weight in (-2.0, -1.0, 0.0, 1.0, 2.0):
        sizer = DynamicPageSizer(WIDTH)
        sizer.head.weight.data[0, 0] = weight
        ends = torch.tensor(list(accumulate(sizer(hidden))))
        lengths.append(int(((ends > 300) & (ends <= 600)).sum()))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2] < lengths[-1]


def test_sizes_depend_on_this_text_only() -> None:
    sizer = random_sizer()
    batch = torch.stack(
        [text(700, seed=seed) for seed in range(3)], 1
    )  # [T, B, C]: rows are strided
    alone = [sizer(text(700, seed=seed)) for seed in range(3)]
    assert [sizer(batch[:, row]) for row in (2, 0, 1)] == [alone[2], alone[0], alone[1]]
    assert len({tuple(sizes) for sizes in alone}) == 3
    copy = DynamicPageSizer(WIDTH)
    copy.load_state_dict(sizer.state_dict())
    assert copy(batch[:, 1]) == alone[1]


@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1e20])
def test_the_scale_of_hidden_states_does_not_matter(factor: float) -> None:
    sizer, hidden = random_sizer(), text(900)
    expected, sizes = sizer(hidden), sizer(hidden * factor)
    gaps = [abs(a - b) for a, b in zip(accumulate(expected), accumulate(sizes), strict=True)]
    assert max(gaps) <= 1, "rounding may move a border by a token"


def test_time_and_memory_grow_with_the_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    elements: list[int] = []
    inner = page_sizer._sinkhorn

    def counted(positions: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        elements.append(len(positions) * len(least))
        return inner(positions, least)

    monkeypatch.setattr(page_sizer, "_sinkhorn", counted)
    sizer = random_sizer(strength=0.3)
    seconds, total, largest = [], [], []
    for count in (2048, 8192):
        hidden = text(count, "noise")
        elements.clear()
        sizer(hidden)
        total.append(sum(elements))
        largest.append(max(elements))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            sizer(hidden)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    assert total[1] < 4.6 * total[0]
    assert largest[1] < 1.3 * largest[0], "one window is as large as another"
    assert seconds[1] < 10 * seconds[0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 20), st.integers(1, 5), st.integers(0, 999))
def test_the_loss_is_the_variance_within_pages(count: int, pages: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(count, pages, generator=generator).softmax(1)
    attention = torch.rand(2, count, generator=generator) ** 4 + 1e-5
    want = [reference_loss(shares.tolist(), row.tolist()) for row in attention]
    assert float(sizing_loss(shares, attention)) == pytest.approx(sum(want) / 2, rel=1e-3, abs=1e-5)
    assert float(sizing_loss(shares, attention[0])) == pytest.approx(want[0], rel=1e-3, abs=1e-5)


def test_the_loss_is_nothing_where_pages_are_even() -> None:
    attention = torch.tensor([0.5, 0.5, 0.01, 0.01])
    apart = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert float(sizing_loss(apart, attention)) == pytest.approx(0, abs=1e-5)
    assert float(sizing_loss(torch.ones(4, 1), attention)) > 0.1


def test_gradients_are_those_of_the_loss() -> None:
    sizer, hidden = random_sizer(strength=0.5), text(700)
    attention = torch.rand(700, generator=torch.Generator().manual_seed(1)) ** 6

    def loss() -> torch.Tensor:
        return sizing_loss(sizer.soft_assign(hidden), attention)

    loss().backward()
    gradient = sizer.head.weight.grad[0].clone()
    direction = gradient / gradient.norm()
    step = 2e-2
    with torch.no_grad():
        sizer.head.weight[0] += step * direction
        above = loss().item()
        sizer.head.weight[0] -= 2 * step * direction
        below = loss().item()
    assert (above - below) / (2 * step) == pytest.approx(float(gradient.norm()), rel=0.1)
    assert float(sizer.head.bias.grad.abs()) < 1e-3 * float(gradient.norm()), "the mean size is set"


def test_training_finds_where_attention_changes_quickly() -> None:
    count, busy = 480, slice(160, 320)
    hidden = text(count, "noise")
    hidden[:, 0] = 0.0
    hidden[busy, 0] = 1.0
    wave = torch.cat([torch.linspace(-2, 2, 40), torch.linspace(2, -2, 40)]).repeat(2)
    attention = torch.ones(count)
    attention[busy] = wave.exp()
    sizer = DynamicPageSizer(WIDTH)
    losses = []
    for _ in range(25):
        loss = sizing_loss(sizer.soft_assign(hidden), attention)
        sizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            sizer.head.weight -= 0.2 * sizer.head.weight.grad / sizer.head.weight.grad.norm()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    ends = torch.tensor(list(accumulate(sizer(hidden))))
    before = torch.tensor(list(accumulate(DynamicPageSizer(WIDTH)(hidden))))
    in_busy = [int(((e > 160) & (e <= 320)).sum()) for e in (before, ends)]
    assert in_busy[1] > 1.5 * in_busy[0]


def test_a_constant_text_fills_a_page_at_the_mean_size() -> None:
    sizer = DynamicPageSizer(WIDTH)
    hidden = text(160, "smooth") * 1e-3 + torch.arange(WIDTH)
    scale = sizer.scale(hidden)
    fills = [sizer.fill(hidden[:n], scale) for n in (1, 15, 16, 17)]
    assert [fill >= 1 for fill in fills] == [False, False, True, True]
    wild = sizer.fill(hidden[:8] * 3, scale)
    assert wild > fills[2], "tokens of a higher value fill it sooner"


def test_pages_grown_token_by_token_are_as_long_as_those_of_the_prompt() -> None:
    sizer, hidden = random_sizer(strength=0.7), text(1500)
    scale = sizer.scale(hidden)
    grown, start = [], 0
    for end in range(1, len(hidden) + 1):
        if end - start == 32 or sizer.fill(hidden[start:end], scale) >= 1:
            grown.append(end - start)
            start = end
    sizes = sizer(hidden)
    assert abs(len(grown) - len(sizes)) < 0.08 * len(sizes)
    assert len(set(grown)) > 5


def test_an_empty_text() -> None:
    sizer = random_sizer()
    assert sizer(torch.empty(0, WIDTH)) == []
    assert sizer.soft_assign(torch.empty(0, WIDTH)).shape == (0, 0)
    assert sizer.fill(text(3), sizer.scale(torch.empty(0, WIDTH))) > 0


def test_pages_that_are_too_long_are_split_evenly() -> None:
    assert page_sizes(torch.tensor([0.0] * 70 + [1.0, 0.0, 3.0])) == [23, 23, 24, 2, 1]


@pytest.mark.parametrize("shape", [(5,), (5, WIDTH + 1), (1, 5, WIDTH)])
def test_hidden_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="hidden: got shape"):
        random_sizer()(torch.zeros(shape))


@pytest.mark.parametrize("mean_size", [0, 33, 2.5])
def test_a_mean_size_out_of_range_is_refused(mean_size: int) -> None:
    with pytest.raises(ConfigError, match="mean_size"):
        DynamicPageSizer(WIDTH, mean_size)
    with pytest.raises(ConfigError, match="mean_size"):
        random_sizer().sizes(text(3), mean_size)

"""Summaries equal brute force over the committed tokens after anything that can happen to a page."""

from __future__ import annotations

import pytest
import torch
from core.dense_twin import DenseTwin, Facts
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_bounds

from oval_core.values import RowRequest

FACTS = Facts(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3, value_dim=3, hidden_size=2)


def check_summaries(twin: DenseTwin) -> None:
    """Brute force over each page's committed tokens, read from the dense copy."""
    for row, seq in enumerate(twin.cache.table.sequences):
        committed = seq.num_committed
        groups = [[t for t in page.tokens if t < committed] for page in seq.pages]
        groups = [tokens for tokens in groups if tokens]
        assert sorted(sum(groups, [])) == list(range(twin.hidden[row].shape[0]))
        if not groups:
            continue
        for layer in range(FACTS.num_layers):
            bounds = twin.cache.summaries.key_bounds(layer, row)
            ids = [page.page_id for page in seq.pages if min(page.tokens) < committed]
            assert list(bounds.page_ids) == ids
            for i, tokens in enumerate(groups):
                lower, upper, mean = reference_bounds(twin.keys[row][layer], tokens)
                assert torch.equal(bounds.lower[i], lower)
                assert torch.equal(bounds.upper[i], upper)
                torch.testing.assert_close(bounds.mean[i].double(), mean, atol=1e-6, rtol=1e-5)
            assert bounds.mean.dtype == torch.float32
        means = twin.cache.summaries.hidden_mean(row)
        want = torch.stack([twin.hidden[row][tokens].double().mean(0) for tokens in groups])
        torch.testing.assert_close(means.double(), want, atol=1e-6, rtol=1e-5)


COUNTS = st.lists(st.integers(0, 7), min_size=4, max_size=4)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["commit", "abort", "begin and abort"]), COUNTS),
    st.tuples(st.just("truncate"), COUNTS),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("reset"), st.just([])),
    st.tuples(st.just("grow"), st.just([40])),
)


def apply_step(twin: DenseTwin, name: str, numbers: list[int]) -> None:
    rows = len(twin.keys) or 2
    counts = [count for count, _ in zip(numbers, range(rows), strict=False)]
    if name == "grow":
        counts = numbers * rows
    if name in ("commit", "abort", "grow") and any(counts) and (name != "abort" or twin.keys):
        twin.forward(
            [max(1, n) for n in counts] if not twin.keys else counts, commit=name != "abort"
        )
    elif name == "begin and abort" and any(counts) and twin.keys:
        twin.begin(counts)
        for layer in range(FACTS.num_layers):  # wild keys: a summary that counts them is wrong
            keys, values = twin.random_kv(rows, max(counts))
            twin.cache.write(layer, keys * 1e6, values)
            check_summaries(twin)
        twin.cache.abort()
    elif name == "truncate" and twin.keys:
        twin.truncate([max(1, n - c) for n, c in zip(twin.lengths, counts, strict=True)])
    elif name == "reorder" and twin.keys:
        twin.reorder([row % rows for row in numbers])
    elif name == "reset":
        twin.reset()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 4, 5]), st.lists(STEPS, min_size=2, max_size=10))
def test_summaries_follow_everything(page_size: int, steps: list[tuple[str, list[int]]]) -> None:
    torch.manual_seed(0)
    twin = DenseTwin(FACTS, compares_attention=False, page_size=page_size, track_hidden=True)
    twin.forward([3, 6])
    check_summaries(twin)
    for name, numbers in steps:
        apply_step(twin, name, numbers)
        check_summaries(twin)


def test_tentative_tokens_never_count() -> None:
    twin = DenseTwin(FACTS, page_size=4, track_hidden=True)
    twin.forward([6])
    before = twin.cache.summaries.key_bounds(0, 0)
    twin.begin([5])
    twin.cache.write(0, *(1e6 * t for t in twin.random_kv(1, 5)))
    during = twin.cache.summaries.key_bounds(0, 0)
    assert during.page_ids == before.page_ids
    assert torch.equal(during.upper, before.upper)
    twin.cache.abort()
    check_summaries(twin)


def test_a_part_of_a_draft_that_was_accepted_counts() -> None:
    twin = DenseTwin(FACTS, page_size=4, track_hidden=True)
    twin.forward([2])
    check_summaries(twin)
    twin.begin([6])
    new = [twin.random_kv(1, 6) for _ in range(2)]
    for layer, (keys, values) in enumerate(new):
        twin.cache.write(layer, keys, values)
    check_summaries(twin)
    twin.cache.table.commit(0, [0, 3, 5])
    for layer in range(2):
        got = twin.cache.summaries.key_bounds(layer, 0)
        keys = torch.cat([twin.keys[0][layer], new[layer][0][0][:, [0, 3, 5]]], 1)
        groups = [page.tokens for page in twin.cache.table.sequences[0].pages]
        assert sorted(sum(groups, [])) == [0, 1, 2, 3, 4]
        for i, tokens in enumerate(groups):
            assert torch.equal(got.upper[i], reference_bounds(keys, tokens)[1])


def test_an_unchanged_page_is_summarised_once() -> None:
    twin = DenseTwin(FACTS, compares_attention=False, page_size=4)
    twin.forward([30])
    twin.cache.summaries.key_bounds(0, 0)
    twin.cache.pool.store(0).keys[:, :24] = 1e6  # seen only if a full page is read again
    twin.forward([1], commit=False)
    twin.begin([1])
    for layer in range(2):
        twin.cache.write(layer, *twin.random_kv(1, 1))
    twin.cache.commit()
    assert twin.cache.summaries.key_bounds(0, 0).upper.max() < 1e6


def test_summaries_of_dropped_pages_are_forgotten() -> None:
    twin = DenseTwin(FACTS, page_size=1)
    twin.compares_attention = False
    for _ in range(20):
        twin.forward([50])
        twin.cache.summaries.key_bounds(0, 0)
        twin.reset()
    assert len(twin.cache.summaries._keys[0]) <= 150


def test_hidden_mean_needs_tracking() -> None:
    twin = DenseTwin(FACTS, page_size=4)
    twin.forward([3])
    with pytest.raises(AssertionError, match="track_hidden"):
        twin.cache.summaries.hidden_mean(0)


def test_a_row_without_tokens_has_no_summaries() -> None:
    twin = DenseTwin(FACTS, page_size=4)
    twin.forward([3, 0], num_queries=3)
    with pytest.raises(AssertionError, match="no committed token"):
        twin.cache.summaries.key_bounds(0, 1)
    twin.cache.begin([RowRequest(1), RowRequest(1)], 1, torch.device("cpu"))
    with pytest.raises(AssertionError, match="no committed token"):
        twin.cache.summaries.key_bounds(0, 1)


def test_means_are_float32_sums_also_of_a_short_dtype() -> None:
    facts = Facts(num_kv_heads=1, head_dim=3, dtype=torch.bfloat16)
    twin = DenseTwin(facts, compares_attention=False, page_size=32, track_hidden=True)
    twin.forward([32])
    bounds = twin.cache.summaries.key_bounds(1, 0)
    assert bounds.lower.dtype == bounds.upper.dtype == torch.bfloat16
    mean = reference_bounds(twin.keys[0][1], range(32))[2]
    torch.testing.assert_close(bounds.mean[0].double(), mean, atol=1e-6, rtol=1e-5)
    want = twin.hidden[0].double().mean(0)
    torch.testing.assert_close(
        twin.cache.summaries.hidden_mean(0)[0].double(), want, atol=1e-6, rtol=1e-5
    )


def test_other_tokens_in_equal_number_make_another_summary() -> None:
    twin = DenseTwin(FACTS, page_size=8, track_hidden=True)
    twin.forward([6, 4])
    check_summaries(twin)
    twin.truncate([3, 1])
    twin.forward([3, 3])
    check_summaries(twin)
    twin.reorder([1, 1])
    twin.truncate([4, 2])
    twin.forward([0, 2])
    check_summaries(twin)

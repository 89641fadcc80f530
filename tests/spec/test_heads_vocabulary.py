"""Draft vocabularies: counting, mapping there and back, what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_spec.heads import IGNORED, DraftVocabulary

V = 12


@given(st.lists(st.integers(0, V - 1), min_size=1), st.integers(1, V + 2))
def test_it_has_the_most_frequent_tokens_by_id(tokens: list[int], size: int) -> None:
    vocabulary = DraftVocabulary.from_counts(tokens, size, V)
    counts = Counter(tokens)
    ids = vocabulary.token_ids.tolist()
    assert ids == sorted(ids)
    assert len(vocabulary) == min(size, len(counts))
    assert set(ids) <= set(counts)
    left_out = [count for token, count in counts.items() if token not in ids]
    assert max(left_out, default=0) <= min(counts[token] for token in ids)


@given(st.permutations(range(V)), st.integers(1, V))
def test_ids_go_there_and_back(order: list[int], size: int) -> None:
    vocabulary = DraftVocabulary(torch.tensor(order[:size]), V)
    drafts = torch.arange(size)
    assert vocabulary.to_target(drafts).tolist() == order[:size]
    assert torch.equal(vocabulary.to_draft(vocabulary.to_target(drafts)), drafts)
    lacking = torch.tensor(order[size:], dtype=torch.long)
    assert (vocabulary.to_draft(lacking) == IGNORED).all()


def test_labels_that_count_nowhere_stay_so() -> None:
    vocabulary = DraftVocabulary(torch.tensor([V - 1, 4]), V)
    labels = vocabulary.to_draft(torch.tensor([[4, -100], [-1, V - 1]]))
    assert labels.tolist() == [[1, IGNORED], [IGNORED, 0]]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([], dtype=torch.long), "one or more token ids"),
        (torch.tensor([[1]]), "one or more token ids"),
        (torch.tensor([1.0]), "torch.float32"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([1, -1]), "token -1. Allowed: 0 to 11"),
        (torch.tensor([1, V]), "token 12. Allowed: 0 to 11"),
        (torch.tensor([1, 2, 1]), "token 1 more than once"),
    ],
)
def test_bad_ids_are_refused(ids: torch.Tensor, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DraftVocabulary(ids, V)


@pytest.mark.parametrize(
    ("tokens", "size", "says"),
    [
        ([], 3, "no tokens"),
        ([V], 3, "12"),
        ([-100, 1], 3, "-100"),
        ([1], 0, "size 0"),
        ([1], True, "True"),
    ],
)
def test_bad_counts_are_refused(tokens: list[int], size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DraftVocabulary.from_counts(tokens, size, V)

"""Which pages a forward reads. Knows nothing of K/V, devices or models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oval_core.errors import ConfigError, did_you_mean
from oval_core.pages import SequencePages
from oval_core.values import PageSelection


class SelectionPolicy(Protocol):
    """Chooses, once a forward, the pages that its queries read."""

    name: str

    def select(self, sequences: Sequence[SequencePages]) -> PageSelection:
        """Returns the pages to read for each row; those of uncommitted tokens must be among them."""
        ...


class FullPolicy:
    """Reads every page: equal to dense attention."""

    name = "full"

    def select(self, sequences: Sequence[SequencePages]) -> PageSelection:
        """Returns all pages of every row."""
        return PageSelection((None,) * len(sequences))


def create_policy(name: str) -> SelectionPolicy:
    """Returns the policy of this name; raises `ConfigError` for another."""
    policies = {FullPolicy.name: FullPolicy}
    if name not in policies:
        raise ConfigError(f"policy: got {name!r}; {did_you_mean(name, policies)}")
    return policies[name]()

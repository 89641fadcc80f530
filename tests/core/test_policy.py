"""`full` reads every token of every row; names are looked up, never guessed."""

from __future__ import annotations

import pytest

from oval_core.config import POLICY_NAMES
from oval_core.errors import ConfigError
from oval_core.page_table import PageTable
from oval_core.policy import FullPolicy, create_policy


def test_full_reads_every_page_of_every_row() -> None:
    table = PageTable(4)
    table.open_sequences(3)
    table.make_room([4] * 10)
    table.append(0, 6)
    assert FullPolicy().select(table.sequences).pages == (None, None, None)


def test_every_policy_name_of_the_config_can_be_made() -> None:
    assert [create_policy(name).name for name in POLICY_NAMES] == list(POLICY_NAMES)


@pytest.mark.parametrize(
    ("name", "hint"), [("fulll", "did you mean 'full'"), ("zz", "Allowed: full")]
)
def test_an_unknown_policy_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"policy: got '{name}'; {hint}"):
        create_policy(name)

"""Every wrong setting of speculative decoding is named before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.speculation_config import SpeculationConfig

WRONG: dict[str, tuple[Any, str]] = {
    "a name alone": ("ngram", "settings such as"),
    "unknown key": ({"nodes": 3}, "unknown config key 'speculation.nodes'"),
    "key that is no text": ({1: 2}, "unknown config key 'speculation.1'"),
    "drafter": ({"drafter": "medussa"}, "did you mean 'medusa'"),
    "a list of drafters": ({"drafter": ["medusa"]}, "speculation.drafter"),
    "verification": ({"verification": "typ"}, "speculation.verification"),
    "fusion": ({"fusion": 3}, "speculation.fusion"),
    "self_policy": ({"self_policy": "full"}, "speculation.self_policy"),
    "no nodes": ({"max_nodes": 0}, "speculation.max_nodes"),
    "half a node": ({"max_nodes": 2.5}, "speculation.max_nodes"),
    "depth": ({"depth": True}, "speculation.depth"),
    "self_budget": ({"self_budget": 0}, "speculation.self_budget"),
    "ngram_min": ({"ngram_min": 9}, "up to ngram_max"),
    "threshold": ({"typical_threshold": float("nan")}, "speculation.typical_threshold"),
    "alpha": ({"typical_alpha": 0}, "speculation.typical_alpha"),
    "heads": ({"heads": None}, "speculation.heads"),
    "tree": ({"tree": ""}, "speculation.tree"),
    "no draft model": ({"drafter": "draft"}, "speculation.draft_model"),
    "a draft model too many": ({"draft_model": "smol"}, "speculation.draft_model"),
    "a draft model without a name": (
        {"drafter": "draft", "draft_model": ""},
        "speculation.draft_model",
    ),
    "a draft model that is none": ({"drafter": "draft", "draft_model": 3}, "draft_model: got 3"),
    "turns_off": ({"turns_off": "no"}, "speculation.turns_off: got 'no'"),
    "turns_off unset": ({"turns_off": None}, "speculation.turns_off"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig.from_dict(values)
    with pytest.raises(ConfigError, match=message):
        OvalConfig.from_dict({"speculation": values})


def test_right_settings_are_kept() -> None:
    values = {"drafter": "draft", "draft_model": "smol", "max_nodes": 1, "turns_off": False}
    config = SpeculationConfig.from_dict(values)
    assert {name: getattr(config, name) for name in values} == values
    assert SpeculationConfig.from_dict(config) is config

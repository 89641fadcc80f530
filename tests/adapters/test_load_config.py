"""Configurations load by name, path and mapping; whatever is wrong in them is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oval_adapters import config_names, load_config
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError

WRONG: dict[str, tuple[dict[Any, Any], str]] = {
    "misspelt key": ({"page_sise": 16}, "'page_sise'.*did you mean 'page_size'"),
    "unknown key": ({"colour": 1}, "unknown config key 'colour'.*Allowed:.*page_size"),
    "key that is no text": ({3: 1}, "unknown config key 3"),
    "no page": ({"page_size": 0}, r"page_size: got 0.*1\.\.32"),
    "negative page": ({"page_size": -1}, r"page_size: got -1.*1\.\.32"),
    "large page": ({"page_size": 33}, r"page_size: got 33.*1\.\.32"),
    "page as text": ({"page_size": "16"}, "page_size: got '16'.*whole number"),
    "half a page": ({"page_size": 1.5}, "page_size: got 1.5"),
    "page as truth": ({"page_size": True}, "page_size: got True"),
    "page of nothing": ({"page_size": None}, "page_size: got None"),
    "misspelt policy": ({"policy": "ful"}, "policy: got 'ful'.*did you mean 'full'"),
    "policy as list": ({"policy": ["full"]}, "policy"),
    "misspelt backend": ({"backend": "torhc"}, "backend.*did you mean 'torch'"),
    "backend of nothing": ({"backend": None}, "backend: got None"),
    "no reserve": ({"reserve_tokens": 0}, "reserve_tokens: got 0.*1 or more"),
    "track_hidden as text": ({"track_hidden": "yes"}, "track_hidden: got 'yes'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mapping_is_named(wrong: str) -> None:
    values, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        load_config(values)


@pytest.mark.parametrize("size", [1, 2, 31, 32])
def test_the_ends_of_the_range_are_allowed(size: int) -> None:
    assert load_config({"page_size": size}).page_size == size


@pytest.mark.parametrize("name", config_names())
def test_a_shipped_name_loads_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_config(name), OvalConfig)


def test_the_default_is_nothing_and_default() -> None:
    assert load_config() == load_config(None) == load_config("default") == OvalConfig()
    assert load_config({}) == OvalConfig()
    config = OvalConfig(page_size=8)
    assert load_config(config) is config
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_loads(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\npage_size: 4\nbackend: sdpa\n", encoding="utf-8")
    config = load_config(str(path) if as_text else path)
    assert (config.page_size, config.backend) == (4, "sdpa")


FILES: dict[str, tuple[bytes, str]] = {
    "unknown key": (b"page_sise: 4\n", "wrong.yaml.*did you mean 'page_size'"),
    "out of range": (b"page_size: 40\n", r"wrong.yaml.*1\.\.32"),
    "list": (b"- 1\n- 2\n", "wrong.yaml.*list"),
    "word": (b"hello\n", "wrong.yaml.*str"),
    "broken": (b"a: [1,\n", "wrong.yaml.*YAML"),
    "object": (b"a: !!python/object/apply:os.getcwd []\n", "wrong.yaml.*YAML"),
    "not text": (b"\xff\xfe\x00page", "wrong.yaml"),
}


@pytest.mark.parametrize("wrong", FILES)
def test_a_wrong_file_is_named(tmp_path: Path, wrong: str) -> None:
    content, message = FILES[wrong]
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n", encoding="utf-8")
    assert load_config(path) == OvalConfig()


def test_a_name_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'smoll'.*did you mean 'smol'"):
        load_config("smoll")
    with pytest.raises(ConfigError, match="no file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="no file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError):
        load_config("")


@pytest.mark.parametrize("source", [3, 1.5, ["default"], object()])
def test_a_source_of_another_kind_is_named(source: Any) -> None:
    with pytest.raises(ConfigError, match="config: got"):
        load_config(source)

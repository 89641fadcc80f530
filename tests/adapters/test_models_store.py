"""Where built models are, what counts as whole, and what a `--model` text means."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest

from oval_adapters.models import build_model, list_models, model_path, resolve_model
from oval_adapters.models.catalog import MODELS, find_model
from oval_adapters.models.errors import CorruptModelError, ModelNotBuiltError, UnknownModelError
from oval_adapters.models.resolve import served_name
from oval_adapters.models.store import verify
from oval_core.cache_folder import cache_dir


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    tiny = fake_model.setup(monkeypatch, tmp_path)
    build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)
    return tiny


def test_catalog_names_its_entries() -> None:
    assert all(name == model.name for name, model in MODELS.items())
    with pytest.raises(
        UnknownModelError, match=r"'smoll'.*did you mean 'smol'.*Allowed: dinov2-small, smol"
    ):
        find_model("smoll")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVAL_CACHE", "~/some where")
    assert cache_dir() == Path("~/some where").expanduser()
    monkeypatch.setenv("OVAL_CACHE", "")
    assert cache_dir() == Path("~/.cache/oval").expanduser()


def test_a_model_that_is_not_built_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = fake_model.setup(monkeypatch, tmp_path)
    with pytest.raises(ModelNotBuiltError, match="oval models build tiny"):
        model_path("tiny")
    (status,) = list_models()
    assert (status.state, status.disk_bytes, status.path) == ("not built", 0, tiny.folder)
    assert not tiny.cache.exists()  # looking makes nothing


def test_a_built_model_is_found_and_whole(built: SimpleNamespace) -> None:
    assert model_path("tiny") == built.folder
    manifest = verify("tiny", deep=True)
    assert sorted(manifest.files) == ["config.json", "model.safetensors"]
    (status,) = list_models()
    assert (status.state, status.problem) == ("built", "")
    assert status.disk_bytes == manifest.total_bytes > len(fake_model.WEIGHTS)


def test_looking_at_a_built_model_is_instant(built: SimpleNamespace) -> None:
    begin = time.perf_counter()
    assert build_model("tiny") == built.folder
    assert time.perf_counter() - begin < 0.05


def test_a_truncated_file_is_named(built: SimpleNamespace) -> None:
    (built.folder / "model.safetensors").write_bytes(b"short")
    expected = rf"model\.safetensors has 5 bytes, expected {len(fake_model.WEIGHTS):,}.*--force"
    for look in (model_path, build_model):
        with pytest.raises(CorruptModelError, match=expected):
            look("tiny")
    (status,) = list_models()
    assert status.state == "broken"
    assert "model.safetensors" in status.problem


def test_a_missing_file_is_named(built: SimpleNamespace) -> None:
    (built.folder / "config.json").unlink()
    with pytest.raises(CorruptModelError, match=r"config\.json is missing"):
        model_path("tiny")


def test_a_flipped_byte_is_found_by_the_deep_check(built: SimpleNamespace) -> None:
    path = built.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert model_path("tiny") == built.folder  # the size is right
    with pytest.raises(CorruptModelError, match=r"model\.safetensors has sha256 .*, expected"):
        verify("tiny", deep=True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is missing"),
        ('{"format": 1, "fil', "is cut off or damaged"),
        ("[]", "is cut off or damaged"),
        ('{"format": 99}', "has format 99, expected 1"),
        ('{"format": 1, "files": {}}', "is cut off or damaged"),
    ],
)
def test_a_bad_manifest_is_named(built: SimpleNamespace, content: str | None, problem: str) -> None:
    path = built.folder / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(CorruptModelError, match=rf"manifest\.json {problem}.*--force"):
        model_path("tiny")


def test_a_model_of_another_source_is_refused(built: SimpleNamespace) -> None:
    path = built.folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"source_sha256": "0" * 64}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CorruptModelError, match="built from another file"):
        model_path("tiny")


def test_resolve_gives_paths_and_hub_ids(built: SimpleNamespace, tmp_path: Path) -> None:
    local = tmp_path / "my model"
    local.mkdir()
    (local / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_model("tiny") == str(built.folder)
    assert resolve_model(str(local)) == str(local)
    assert resolve_model("owner/some-model_1.5") == "owner/some-model_1.5"
    with pytest.raises(UnknownModelError, match="hub id OWNER/NAME"):
        resolve_model("gpt2")


def test_an_embedded_name_comes_before_a_folder(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == str(built.folder)
    assert resolve_model("./tiny") == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("./nowhere", "no such model folder"),
        ("/no/where", "no such model folder"),
        ("tinyy", "did you mean 'tiny'"),
        ("", "is no model"),
        ("a/b/c", "is no model"),
        ("two words", "is no model"),
        (str(Path(__file__).parent), r"holds no config\.json"),
        (__file__, "is a file"),
    ],
)
def test_resolve_refuses(built: SimpleNamespace, text: str, problem: str) -> None:
    with pytest.raises(UnknownModelError, match=rf"{problem}.*Allowed: .*tiny"):
        resolve_model(text)


def test_other_servers_are_told_the_hub_id_of_an_embedded_model() -> None:
    assert served_name("smol") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert served_name("owner/name") == "owner/name"
    assert served_name("some/folder") == "some/folder"


def test_an_embedded_model_that_is_on_no_hub_is_named_by_its_folder(built: SimpleNamespace) -> None:
    assert served_name("tiny") == str(built.folder)

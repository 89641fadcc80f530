"""The weight files of a folder: which names hold them, what keys they have, reading some of these. It knows no layout."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oval_core.errors import ConfigError

HEADS_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE_NAMES = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".pt", ".bin")


def make_folder(folder: str | Path) -> Path:
    """Returns a folder that is there afterwards; raises `ConfigError` where none can be."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"heads {path}: cannot be a folder ({error}). Allowed: a folder, or a new path. Name another one."
        ) from error
    return path


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where each key lies.

    Attributes:
        folder: of the files.
        places: file name by key.
    """

    folder: Path
    places: Mapping[str, str]

    def read(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns these tensors on the CPU; files without any of them are not opened."""
        found: dict[str, torch.Tensor] = {}
        for name in sorted({self.places[key] for key in keys}):
            wanted = [key for key in keys if self.places[key] == name]
            found.update(_read(self.folder / name, wanted))
        return found

    def names(self, keys: Collection[str]) -> tuple[str, ...]:
        """Returns the names of the files that hold these keys."""
        return tuple(sorted({self.places[key] for key in keys}))


def find_weights(folder: Path) -> WeightFiles:
    """Returns the weights of a folder: heads' own files first, then a sharded, then a whole model.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    for name in HEADS_NAMES:
        if (folder / name).is_file():
            return _whole(folder, name)
    for name in _INDEX_NAMES:
        if (folder / name).is_file():
            return _sharded(folder, name)
    for name in _WHOLE_NAMES:
        if (folder / name).is_file():
            return _whole(folder, name)
    try:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _SUFFIXES)
    except OSError as error:
        raise ConfigError(
            f"heads {folder}: cannot be read ({error}). Allowed: a folder with draft heads. Name such a folder."
        ) from error
    if len(others) == 1:
        return _whole(folder, others[0])
    raise ConfigError(
        f"heads {folder}: got {', '.join(others) or 'no weight files'}. Allowed: {', '.join(HEADS_NAMES)}, a model with "
        f"{' or '.join(_INDEX_NAMES + _WHOLE_NAMES)}, or one file of {', '.join(_SUFFIXES)}. Name such a folder."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"heads: {path} cannot be read ({error}). Allowed: a JSON object. Copy the file again."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"heads: got {type(values).__name__} in {path}. Allowed: a JSON object. Copy the file again."
        )
    return values


def _whole(folder: Path, name: str) -> WeightFiles:
    return WeightFiles(folder, dict.fromkeys(_keys(folder / name), name))


def _sharded(folder: Path, index_name: str) -> WeightFiles:
    places = read_json(folder / index_name).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(
            f"heads {folder}: got no weight_map in {index_name}. Allowed: file names by key. Copy the file again."
        )
    for key, name in places.items():
        # A name is joined to the folder and opened: it must not lead out of it.
        is_plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not is_plain or Path(name).suffix not in _SUFFIXES:
            raise ConfigError(
                f"heads {folder}: got {name!r} for {key} in {index_name}. Allowed: names of "
                f"files in that folder that end in {', '.join(_SUFFIXES)}. Do not use this index: it points elsewhere."
            )
    return WeightFiles(folder, places)


def _keys(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_unpickled(path))
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read(path: Path, keys: Collection[str]) -> dict[str, torch.Tensor]:
    try:
        if path.suffix != ".safetensors":
            tensors = _unpickled(path)
            return {key: tensors[key] for key in keys}
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in keys}
    except (KeyError, OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a torch file. Only tensors are unpickled, so a file cannot run code."""
    try:
        is_zip = zipfile.is_zipfile(path)  # the older format cannot be mapped
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"heads: {path} is refused: more than tensors, or damaged ({why}). Allowed: a state dict of tensors, which "
            "loads with weights_only=True. Get the heads as safetensors."
        ) from error
    if not isinstance(values, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in values.items()
    ):
        raise ConfigError(
            f"heads: got a {type(values).__name__} in {path} that is no state dict. Allowed: tensors by name. Save "
            "`heads.state_dict()`."
        )
    return values


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"heads: {path} cannot be read ({error}). Allowed: a whole weight file with the keys of its index. Copy the file "
        "again."
    )

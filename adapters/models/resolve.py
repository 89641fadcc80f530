"""What a user's `--model` means: an embedded model, a local folder, or a hub id."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from oval_adapters.models import catalog
from oval_adapters.models.errors import UnknownModelError
from oval_adapters.models.store import model_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATH_STARTS = (".", "/", "~")


def resolve_model(text: str) -> str:
    """Returns what `from_pretrained` takes: the path of a folder, or a hub id as it is.

    An embedded name comes first (write `./smol` for a folder of that name), then an existing
    folder, then a hub id.

    Raises:
        ModelNotBuiltError: an embedded model that has not been built; the message says how.
        CorruptModelError: an embedded model with a broken file.
        UnknownModelError: a path without a model, a near miss of an embedded name, or no hub id.
    """
    if text in catalog.MODELS:
        return str(model_path(text))
    path = Path(text).expanduser()
    if text and path.exists():
        return _local_folder(path)
    if text.startswith(PATH_STARTS):
        raise UnknownModelError(f"no such model folder: {text}. {_allowed()}")
    near = difflib.get_close_matches(text, catalog.MODELS, n=1, cutoff=0.8)
    if near:
        raise UnknownModelError(f"unknown model {text!r}: did you mean {near[0]!r}? {_allowed()}")
    if not HUB_ID.fullmatch(text):
        raise UnknownModelError(f"{text!r} is no model. {_allowed()}")
    return text


def served_name(text: str) -> str:
    """Returns by what other servers load the model that `resolve_model` would: an embedded name means nothing to them.

    Raises:
        ModelNotBuiltError: an embedded model that is on no hub and has not been built.
    """
    embedded = catalog.MODELS.get(text)
    if embedded is None:
        return text
    return embedded.hub_id or resolve_model(text)


def _local_folder(path: Path) -> str:
    if not path.is_dir():
        raise UnknownModelError(f"{path} is a file, a model is a folder. {_allowed()}")
    if not (path / "config.json").is_file():
        raise UnknownModelError(f"the folder {path} holds no config.json. {_allowed()}")
    return str(path.absolute())


def _allowed() -> str:
    names = ", ".join(sorted(catalog.MODELS))
    return (
        f"Allowed: an embedded model ({names}), a folder with a config.json, a hub id OWNER/NAME."
    )

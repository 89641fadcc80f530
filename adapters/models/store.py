"""The built models on this machine: where each is, and whether its files are whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oval_adapters.models import catalog
from oval_adapters.models.catalog import ComposedModel, EmbeddedModel, find_model
from oval_adapters.models.errors import CorruptModelError, ModelNotBuiltError
from oval_adapters.models.folders import models_dir
from oval_adapters.models.manifest import Manifest, ManifestError, file_problems, read_manifest
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

BUILT = "built"
MISSING = "not built"
BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatus:
    """One embedded model as it is on this machine.

    Attributes:
        model: the facts of the catalog.
        state: `"built"`, `"not built"` or `"broken"`.
        path: where it is, or will be.
        disk_bytes: bytes of the built files; 0 unless built.
        problem: what is broken and what to do; empty unless broken.
    """

    model: EmbeddedModel | ComposedModel
    state: str
    path: Path
    disk_bytes: int
    problem: str


def verify(name: str, *, deep: bool) -> Manifest:
    """Checks a built model's files and returns its manifest.

    Args:
        name: an embedded model.
        deep: compute every sha256 (about a second per GB); without it only existence and sizes.

    Raises:
        UnknownModelError: no embedded model has this name.
        ModelNotBuiltError: it has not been built.
        CorruptModelError: a file is missing, truncated or changed; the message names it.
    """
    model = find_model(name)
    folder = models_dir() / name
    if not folder.exists():
        raise ModelNotBuiltError(
            f"embedded model {name!r} is not built: no folder {folder}. "
            f"Build it once: oval models build {name}"
        )
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        raise _corrupt(name, folder, str(error)) from error
    try:
        source_sha256 = model.source_sha256
    except ConfigError as error:
        raise _corrupt(name, folder, f"what it was made from is gone ({error})") from error
    if manifest.source_sha256 != source_sha256:
        source = f"source sha256 {manifest.source_sha256}, expected {source_sha256}"
        raise _corrupt(name, folder, f"it was built from another file ({source})")
    problems = file_problems(folder, manifest, deep=deep)
    if problems:
        raise _corrupt(name, folder, "; ".join(problems))
    return manifest


def model_path(name: str) -> Path:
    """Returns the folder of a built model, ready for `from_pretrained`.

    Existence and sizes of its files are checked each time, which takes no noticeable time.

    Raises:
        UnknownModelError: no embedded model has this name.
        ModelNotBuiltError: it has not been built; the message says how.
        CorruptModelError: a file is missing or truncated; the message names it.
    """
    verify(name, deep=False)
    return models_dir() / name


def list_models() -> list[ModelStatus]:
    """Returns every embedded model with its state on this machine; raises for none of them."""
    return [_status(model) for model in catalog.MODELS.values()]


def _status(model: EmbeddedModel | ComposedModel) -> ModelStatus:
    state, disk_bytes, problem = BUILT, 0, ""
    try:
        disk_bytes = verify(model.name, deep=False).total_bytes
    except ModelNotBuiltError:
        state = MISSING
    except CorruptModelError as error:
        state, problem = BROKEN, str(error)
    return ModelStatus(
        model=model,
        state=state,
        path=models_dir() / model.name,
        disk_bytes=disk_bytes,
        problem=problem,
    )


def _corrupt(name: str, folder: Path, problem: str) -> CorruptModelError:
    return CorruptModelError(
        f"embedded model {name!r} in {folder} is broken: {problem}. "
        f"Rebuild it: oval models build {name} --force"
    )

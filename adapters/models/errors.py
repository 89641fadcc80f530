"""What can go wrong with embedded models. Each message names the thing and the way out."""

from __future__ import annotations

from oval_core.errors import OvalError


class UnknownModelError(OvalError, ValueError):
    """A name is neither an embedded model, nor a usable folder, nor a possible hub id."""


class ModelNotBuiltError(OvalError, RuntimeError):
    """An embedded model was asked for that has not been built on this machine yet."""


class CorruptModelError(OvalError, RuntimeError):
    """A file of a built model is missing, truncated or changed."""


class DownloadError(OvalError, RuntimeError):
    """A model's package could not be fetched, or is not the file that was expected."""


class BuildError(OvalError, RuntimeError):
    """A model's source file could not be turned into a Hugging Face folder."""


class CacheFolderError(OvalError, RuntimeError):
    """The cache folder cannot be used: not a folder, not writable, or too little space."""

"""One base class catches all that a user can mend; builtin classes still fit."""

from __future__ import annotations

import pytest

from oval_core import errors
from oval_core.errors import OvalError, did_you_mean


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("UnsupportedModelError", ValueError),
        ("CacheMismatchError", ValueError),
        ("PromptTooLongError", ValueError),
        ("BackendUnavailableError", RuntimeError),
    ],
)
def test_every_error_is_an_oval_error_and_a_builtin_one(name: str, builtin: type) -> None:
    error = getattr(errors, name)
    assert issubclass(error, OvalError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ("pag_size", "did you mean 'page_size'? Allowed: backend, page_size."),
        ("xyz", "Allowed: backend, page_size."),
        ("", "Allowed: backend, page_size."),
    ],
)
def test_did_you_mean(got: str, want: str) -> None:
    assert did_you_mean(got, {"page_size", "backend"}) == want
    assert did_you_mean(got, (name for name in ("backend", "page_size"))) == want

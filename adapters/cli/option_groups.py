"""Options that several commands share, kept together as the fields of a dataclass. Knows no option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints


def with_options(
    command: Callable[..., None], *, leave_out: Collection[str] = (), **groups: type
) -> Callable[..., None]:
    """Gives a command an option for each field of some dataclasses; it gets each of them whole, as an argument.

    Args:
        command: takes an argument of each name in `groups`, beside its own.
        leave_out: fields that become no option of this command: they keep their defaults.
        groups: dataclasses, by argument; their fields are annotated as Typer's options, and one without a default must
            be given.
    """
    hints = {name: get_type_hints(group, include_extras=True) for name, group in groups.items()}
    told = {
        name: [field for field in fields(group) if field.name not in leave_out]
        for name, group in groups.items()
    }
    options = [
        _option(field, hints[name][field.name]) for name, own in told.items() for field in own
    ]
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name not in groups
    ]

    def run(**arguments: Any) -> None:
        given = {
            name: group(**{field.name: arguments.pop(field.name) for field in told[name]})
            for name, group in groups.items()
        }
        command(**given, **arguments)

    # Typer makes the options from these.
    run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _option(field: Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


def flags_given(group: Any) -> list[str]:
    """Returns the flags of a dataclass of options that were given, as typed: those that are not None."""
    names = [field.name for field in fields(group) if getattr(group, field.name) is not None]
    return [f"--{name.replace('_', '-')}" for name in names]

"""The flags of speculative decoding, and what they make of a configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.option_groups import flags_given

if TYPE_CHECKING:
    from oval_core.config import OvalConfig

_PANEL = "Speculation: several tokens a forward (exact unless --typical)"


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **settings)


Spec = Annotated[
    str | None,
    _option(metavar="NAME", help="auto, medusa, hybrid, draft, ngram, self or none; turns it on."),
]
Heads = Annotated[
    str | None, _option(metavar="NAME|FOLDER", help="Draft heads; auto: those that ship.")
]
DraftModel = Annotated[
    str | None, _option(metavar="MODEL", help="Of --spec draft: a smaller model of the tokenizer.")
]
Tree = Annotated[
    str | None, _option(metavar="NAME", help="Shape of the tree of heads; auto grows it.")
]
MaxNodes = Annotated[
    int | None, _option(help="Tokens a forward verifies; chosen by its cost if not given.")
]
Depth = Annotated[int | None, _option(help="Tokens that draft and self propose in a row.")]
Typical = Annotated[
    bool | None, _option("--typical", help="Medusa's typical acceptance: faster, lossy.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationOptions:
    """What the user typed; None where nothing. Most names are those of `SpeculationConfig`."""

    spec: Spec = None
    heads: Heads = None
    draft_model: DraftModel = None
    tree: Tree = None
    max_nodes: MaxNodes = None
    depth: Depth = None
    typical: Typical = None

    @property
    def flags(self) -> list[str]:
        """The flags that were given, as typed."""
        return flags_given(self)

    def apply(self, config: OvalConfig) -> OvalConfig:
        """Returns the configuration with what was given put over its speculation, field by field.

        Raises:
            ConfigError: a value is wrong, or nothing turns speculation on.
        """
        from oval_core.errors import ConfigError
        from oval_core.speculation_config import SpeculationConfig

        if not self.flags:
            return config
        if self.spec is None and config.speculation is None:
            raise ConfigError(
                f"speculation: got {', '.join(self.flags)} without --spec. Allowed: with --spec, or where the configuration "
                "has speculation. Add --spec auto."
            )
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= {"drafter": given.pop("spec")}
        if given.pop("typical"):
            given["verification"] = "typical"
        given = {name: value for name, value in given.items() if value is not None}
        before = {} if config.speculation is None else asdict(config.speculation)
        if given.get("drafter", "draft") != "draft":
            before.pop(
                "draft_model", None
            )  # the configuration's draft model belongs to its own drafter
        return replace(config, speculation=SpeculationConfig(**(before | given)))

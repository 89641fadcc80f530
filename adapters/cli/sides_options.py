"""The flags of `oval eval acceptance` that say which drafters are compared, and how they draft."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oval_adapters.evaluation.settings import Side
    from oval_core.config import OvalConfig

_PANEL = "Drafters"
_DEFAULT = "hybrid,medusa,ngram"
_BUILTIN = "builtin"


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **settings)


Spec = Annotated[
    str | None,
    _option(
        metavar="LIST",
        help=f"Drafters with commas, the main one first, by default {_DEFAULT}; each may have settings of its own, such as "
        "medusa:max_nodes=15:heads=FOLDER.",
    ),
]
Heads = Annotated[str | None, _option(metavar="builtin|FOLDER", help="Heads of medusa and hybrid.")]
DraftModel = Annotated[str | None, _option(help="Model of the drafter draft.")]
Tree = Annotated[str | None, _option(help="Shape of a tree of heads.")]
MaxNodes = Annotated[int | None, _option(help="Nodes of a tree, the last token included.")]
Depth = Annotated[int | None, _option(help="Tokens that draft and self propose in a row.")]
Typical = Annotated[
    bool | None, _option("--typical", help="Medusa's typical acceptance: faster, lossy.")
]
TurnsOff = Annotated[
    bool | None,
    _option(
        "--turns-off/--no-turns-off",
        help="Let speculation turn itself off where it is slower; by default every step drafts.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SidesOptions:
    """What the user typed; None where nothing. Most names are those of `SpeculationConfig`."""

    spec: Spec = None
    heads: Heads = None
    draft_model: DraftModel = None
    tree: Tree = None
    max_nodes: MaxNodes = None
    depth: Depth = None
    typical: Typical = None
    turns_off: TurnsOff = None

    def sides(self, config: OvalConfig) -> tuple[Side, ...]:
        """Returns the drafters; what was given lies over the speculation of a configuration.

        Raises:
            ConfigError: see `parse_sides`.
        """
        from oval_adapters.evaluation.settings import parse_sides

        names = ("heads", "draft_model", "tree", "max_nodes", "depth")
        shared = {} if config.speculation is None else asdict(config.speculation)
        shared |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        shared["turns_off"] = bool(self.turns_off)
        if self.typical:
            shared["verification"] = "typical"
        if shared.get("heads") == _BUILTIN:
            shared["heads"] = "auto"
        return parse_sides(self.spec or _DEFAULT, shared)

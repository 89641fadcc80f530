"""The flags of a budget of image tokens, and what they make of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.option_groups import flags_given

if TYPE_CHECKING:
    from oval_core.config import OvalConfig

_PANEL = "Image tokens: read a part of each picture (lossy)"
DOWNSAMPLE = "downsample"
"""A control in place of a router: pictures lose detail, every image token is read."""


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **settings)


Budget = Annotated[
    str | None,
    _option(metavar="SHARE|TOKENS", help="Image tokens that a prompt reads: 33%, 0.33, or a number of tokens."),
]  # fmt: skip
Router = Annotated[
    str | None,
    _option(
        metavar="NAME|FOLDER",
        help="Who chooses them: auto, clip, key-mean, feature-norm, a trained fusion router's folder; controls: random, uniform, downsample.",
    ),
]
Clip = Annotated[
    str | None, _option(metavar="MODEL", help="CLIP of --router clip: a name, a folder, or open_clip:ARCHITECTURE,WEIGHTS.")
]  # fmt: skip
RouterSeed = Annotated[int | None, _option(help="Of --router random.")]
Tile = Annotated[int | None, _option(help="Patches on a side of an image page, 1..5: smaller pages meet a budget more closely. Default: 4.")]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionOptions:
    """What the user typed; None where nothing."""

    budget: Budget = None
    router: Router = None
    clip: Clip = None
    router_seed: RouterSeed = None
    tile: Tile = None

    @property
    def downsample(self) -> float | None:
        """The share of image tokens whose detail pictures keep, under the control of that name; None without it.

        Raises:
            ConfigError: it has no share, or flags of a router besides.
        """
        from oval_core.errors import ConfigError

        if self.router != DOWNSAMPLE:
            return None
        share = None if self.budget is None else parse_budget(self.budget)
        if not isinstance(share, float) or share <= 0:
            raise ConfigError(
                f"budget: got {self.budget!r} with --router {DOWNSAMPLE}. Allowed: a share such as 33%. Give one."
            )
        if any(own is not None for own in (self.clip, self.router_seed, self.tile)):
            raise ConfigError(
                f"router: got {DOWNSAMPLE!r} with flags of a router. Allowed: --budget alone. Leave --clip, --router-seed and "
                "--tile out."
            )
        return share

    def apply(self, config: OvalConfig) -> OvalConfig:
        """Returns the configuration with what was given put over its `vision`, field by field.

        Raises:
            ConfigError: a value is wrong, or nothing says how much is read.
        """
        from oval_core.errors import ConfigError
        from oval_core.vision_config import VisionConfig

        if not flags_given(self) or self.downsample is not None:
            return config
        before = config.vision or VisionConfig()
        chooses = [flag for flag in flags_given(self) if flag != "--tile"]
        if chooses and self.budget is None and not before.limits_images:
            raise ConfigError(
                f"budget: got {', '.join(chooses)} without --budget. Allowed: with --budget, or where the "
                "configuration has one. Add --budget 33%."
            )
        given: dict[str, Any] = {
            "router": self.router,
            "clip": self.clip,
            "seed": self.router_seed,
            "tile": self.tile,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if self.budget is not None:
            value = parse_budget(self.budget)
            is_share = isinstance(value, float)
            given |= {"budget": value if is_share else None, "budget_tokens": None if is_share else value}  # fmt: skip
        return replace(config, vision=replace(before, **given))


def parse_budget(text: str) -> float | int:
    """Returns a share (a number with % or a point) or a number of tokens.

    Raises:
        ConfigError: it is neither.
    """
    from oval_core.errors import ConfigError

    plain = text.strip()
    try:
        if plain.endswith("%"):
            value: float | int = float(plain[:-1]) / 100
        else:
            value = float(plain) if "." in plain else int(plain)
    except ValueError:
        value = -1
    if not (0 <= value <= 1 if isinstance(value, float) else value >= 0):
        raise ConfigError(
            f"budget: got {text!r}. Allowed: a share (33%, 0.33), at most 100%, or a number of tokens (64). Give one of them."
        )
    return value

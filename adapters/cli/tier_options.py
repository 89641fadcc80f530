"""The flags of `tiers`, the same for every command that runs OVAL, and what they make of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.option_groups import with_options

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from oval_core.config import OvalConfig

_PANEL = "Tiers: KV larger than fast memory"


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **settings)


FastTokens = Annotated[
    int | None, _option(help="Tokens whose KV fit in fast memory; turns tiers on.")
]
HostTokens = Annotated[
    int | None, _option(help="Tokens that main memory holds besides; the rest goes to --disk.")
]
Disk = Annotated[str | None, _option(metavar="FOLDER", help="Folder of the page file.")]
DirectIo = Annotated[
    bool | None,
    _option("--direct-io/--no-direct-io", help="Go past the page cache of the system."),
]
Prefetch = Annotated[
    str | None, _option(metavar="ORDER", help="What is fetched ahead: oracle, recent, layer, none.")
]
LinkGbps = Annotated[
    float | None, _option(metavar="GB/S", help="Model a link: slow transfers down to this.")
]
LinkLatency = Annotated[
    float | None,
    _option("--link-latency-us", help="Microseconds a transfer, in the modelled link."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """What the user typed; None where nothing. The names are those of `TierConfig`."""

    fast_tokens: FastTokens = None
    host_tokens: HostTokens = None
    disk: Disk = None
    direct_io: DirectIo = None
    prefetch: Prefetch = None
    link_gbps: LinkGbps = None
    link_latency_us: LinkLatency = None

    @property
    def flags(self) -> list[str]:
        """The flags that were given, as typed."""
        given = [f"--{name.replace('_', '-')}" for name in self._given()]
        off = self.direct_io is False
        return ["--no-direct-io" if off and flag == "--direct-io" else flag for flag in given]

    def apply(self, config: OvalConfig) -> OvalConfig:
        """Returns the configuration with what was given put over its tiers, field by field.

        Raises:
            ConfigError: a value is wrong, or nothing says how large fast memory is.
        """
        from oval_core.config import TierConfig
        from oval_core.errors import ConfigError

        if not self._given():
            return config
        if config.tiers is None and self.fast_tokens is None:
            raise ConfigError(
                f"tiers: got {', '.join(self.flags)} without --fast-tokens. Allowed: with --fast-tokens, or where the "
                "configuration has tiers. Add --fast-tokens N."
            )
        before = {} if config.tiers is None else asdict(config.tiers)
        return replace(config, tiers=TierConfig(**(before | self._given())))

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def check_for_model(config: OvalConfig, hf_config: PretrainedConfig) -> None:
    """Raises `ConfigError` where a model cannot run with these tiers, before its weights are read."""
    from oval_core.tiers import check_tiers

    if config.tiers is not None:
        check_tiers(config, hf_config.get_text_config(decoder=True).num_hidden_layers)


def with_tier_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of `TierOptions`; it gets them together, as its argument `tiers`."""
    return with_options(command, tiers=TierOptions)

"""The flags of policies that select, and what they make of a configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.option_groups import flags_given

if TYPE_CHECKING:
    from oval_core.config import OvalConfig

_PANEL = "Routing: reading a part of the text (lossy)"


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **settings)


Policy = Annotated[
    str | None, _option(metavar="NAME", help="full (exact), routed, or guarded: stated coverage.")
]
Router = Annotated[
    str | None,
    _option(metavar="NAME|FOLDER", help="What scores pages: auto, a name, or a trained router."),
]
TokenBudget = Annotated[int | None, _option(help="Tokens that a layer reads of the text.")]
BudgetShare = Annotated[
    str | None, _option(metavar="20%", help="In place of --token-budget: a share of the text.")
]
Coverage = Annotated[
    float | None, _option(help="Under guarded: attention mass that must be read, estimated.")
]
SecondLook = Annotated[
    float | None,
    _option(metavar="SHARE", help="Of the budget: what each layer's own query spends. 0 for none."),
]
Lead = Annotated[int | None, _option(help="Forwards for which a selection stands.")]
AuditEvery = Annotated[
    int | None, _option(metavar="N", help="Measure what is missed at each N-th forward.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingOptions:
    """What the user typed; None where nothing. All names but `policy` are those of `RoutingConfig`."""

    policy: Policy = None
    router: Router = None
    token_budget: TokenBudget = None
    budget_share: BudgetShare = None
    coverage: Coverage = None
    second_look: SecondLook = None
    lead: Lead = None
    audit_every: AuditEvery = None

    @property
    def flags(self) -> list[str]:
        """The flags that were given, as typed."""
        return flags_given(self)

    def apply(self, config: OvalConfig) -> OvalConfig:
        """Returns the configuration with what was given put over its policy and routing, field by field.

        Raises:
            ConfigError: a value is wrong, or routing was given for a policy that reads everything.
        """
        from oval_core.config import RoutingConfig
        from oval_core.errors import ConfigError

        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "policy"}
        given = {name: value for name, value in given.items() if value is not None}
        policy = config.policy if self.policy is None else self.policy
        if policy == "full":
            if given:
                raise ConfigError(
                    f"routing: got {', '.join(f for f in self.flags if f != '--policy')} with policy 'full', which reads "
                    "everything. Allowed: with --policy routed or guarded. Add one of them."
                )
            return replace(config, policy=policy, routing=None)
        if self.coverage is not None and policy == "routed":
            raise ConfigError(
                "routing: got --coverage with policy 'routed', which promises none. Allowed: with --policy guarded. "
                "Choose that, or leave --coverage out."
            )
        if self.budget_share is not None and self.token_budget is not None:
            raise ConfigError(
                "routing: got --budget-share and --token-budget. Allowed: one of them. Leave one out."
            )
        if self.budget_share is not None:
            given["budget_share"] = parse_share(self.budget_share)
        elif self.token_budget is not None:
            given["budget_share"] = None  # a share of the configuration would win over it
        before = {} if config.routing is None else asdict(config.routing)
        return replace(config, policy=policy, routing=RoutingConfig(**(before | given)))


def parse_share(text: str) -> float:
    """Returns the share that `20%` or `0.2` means.

    Raises:
        ConfigError: it is neither.
    """
    from oval_core.errors import ConfigError

    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(
            f"budget_share: got {text!r}. Allowed: a share such as 20% or 0.2. Give one."
        ) from None

"""What a report says about tiers. A link that was slowed down on purpose is named as such, always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oval_core.config import TierConfig

__all__ = ["MODELLED_LINK", "REAL_LINK", "link_name", "tier_facts", "tier_line"]

MODELLED_LINK = "modelled link"
REAL_LINK = "real"


def link_name(tiers: TierConfig) -> str:
    """Returns whether the times of transfers are real ones."""
    return MODELLED_LINK if tiers.is_modelled_link else REAL_LINK


def tier_facts(tiers: TierConfig | None) -> dict[str, Any] | None:
    """Returns the settings, and what kind of link they make, for JSON; None without tiers."""
    return None if tiers is None else {**asdict(tiers), "link": link_name(tiers)}


def tier_line(facts: Mapping[str, Any] | None) -> str:
    """Returns what `tier_facts` gave as words for a title, what changes times most; empty without tiers."""
    if facts is None:
        return ""
    parts = [f"{facts['fast_tokens']} fast tokens", f"prefetch {facts['prefetch']}"]
    if facts["disk"] is not None:
        parts.append("direct disk" if facts["direct_io"] else "disk")
    if facts["link"] == MODELLED_LINK:
        speed = "" if facts["link_gbps"] is None else f" {facts['link_gbps']:g} GB/s"
        latency = f" {facts['link_latency_us']:g} us" if facts["link_latency_us"] else ""
        parts.append(MODELLED_LINK + speed + latency)
    return ", ".join(parts)

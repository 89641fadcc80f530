"""Settings of policies that select, and routers, for the tiny models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig

ALL = 100_000
SMALL = {"token_budget": 24, "window_size": 4, "num_sink_tokens": 2, "dense_layers": [0]}
TIERS = {"fast_tokens": 64, "sink_tokens": 2, "recent_tokens": 4}
GEMMA = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


def routed(policy: str = "routed", tiers: Any = None, **routing: Any) -> dict[str, Any]:
    return {"page_size": 4, "policy": policy, "routing": {**SMALL, **routing}, "tiers": tiers}


def router_for(model: PreTrainedModel, groups: int = 2, **changes: Any) -> OutputAwareRouter:
    """An untrained router, with weights that make it choose by all that it may know."""
    torch.manual_seed(3)
    size = model.config.hidden_size
    router = OutputAwareRouter(RouterConfig(hidden_size=size, num_groups=groups, **changes))
    for weight in router.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return router.eval()

"""The article's routing head as it is written there: hidden state in, the likeliest page numbers out."""

from __future__ import annotations

import torch
from torch import nn

from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.routing.lora import LoRALinear
from oval_core.routing.router import Lead
from oval_core.routing.view import PageView


class OVALRouter(nn.Module):
    """Two-layer head with one logit a page number; a `Router` too, for policies that select.

    A page number is the page's place in its sequence, so what the head learns is tied to absolute places: measured
    against a content head in docs/claims.md. `OutputAwareRouter` is what ships trained.
    """

    name = "article"
    lead: Lead = "step"
    needs = frozenset({"hidden"})

    def __init__(self, hidden_size: int, num_pages: int, top_k: int = 4) -> None:
        """Makes an untrained head.

        Args:
            hidden_size: C of the decoder.
            num_pages: page numbers it can name; later pages share the last one.
            top_k: how many it names.
        """
        super().__init__()
        for what, value in (("hidden_size", hidden_size), ("num_pages", num_pages)):
            check_int(what, value, 1, None)
        check_int("top_k", top_k, 1, num_pages)
        self.top_k = top_k
        self.num_pages = num_pages
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 64),
            nn.GELU(),
            LoRALinear(64, num_pages, r=4, lora_alpha=8.0, lora_dropout=0.1),
        )
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, hidden_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and page numbers, both [B, top_k], for the last token of [B, T, C].

        Gumbel-softmax in training, plain softmax else.
        """
        if hidden_state.ndim != 3:
            raise ConfigError(
                f"hidden_state: got shape {tuple(hidden_state.shape)}. Allowed: [batch, tokens, hidden size]. "
                "Pass the decoder's last hidden states."
            )
        logits = self.mlp(hidden_state[:, -1]) / self.temperature.clamp(min=1e-3)
        if self.training:
            noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            logits = logits - (-noise.log()).log()
        values, numbers = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return values, numbers

    def score(self, view: PageView) -> torch.Tensor:
        """Returns scores [..., G, P]; see `Router.score`."""
        assert view.hidden is not None, "no hidden state"
        logits = self.mlp(view.hidden.to(self.temperature.dtype))
        logits = logits / self.temperature.clamp(min=1e-3)
        numbers = torch.arange(len(view.starts)).clamp(max=self.num_pages - 1)
        scores: torch.Tensor = logits.index_select(-1, numbers.to(logits.device))
        return scores[..., None, :].expand(view.history.last.shape)

"""The project's router: scores pages by the decoder's last hidden state, by where they lie and by what they got.

Shapes as in `view.py`; E length of a page embedding, F features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.routing.features import (
    graph_feature,
    history_features,
    lead_feature,
    place_features,
    signal_features,
)
from oval_core.routing.graph_conv import GraphConv
from oval_core.routing.key_signals import SIGNALS
from oval_core.routing.locality import NUM_FEATURES
from oval_core.routing.lora import LoRALinear
from oval_core.routing.router import FILLS_BY, Lead
from oval_core.routing.view import PageView

HEADS = ("absolute", "content")
_NUM_HISTORY = 7
_GUMBEL = 0.5
"""Scale of the noise in training: at 1 most of the choice would be noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Shape of an `OutputAwareRouter`.

    Attributes:
        hidden_size: C of the decoder.
        num_groups: G, selections a forward.
        head: `content`: query of the hidden state times page embedding; `absolute`: the article's literal head, one
            logit a page number, at most `num_pages` of them.
        num_pages: page numbers of the absolute head.
        content: whether the hidden state is read at all.
        decay: whether distance is.
        graph: whether co-occurrence is.
        history: whether past mass is.
        signals: key signals with the previous query that it reads.
        embedding_size: E.
        mlp_size: hidden units.
        lora_rank: rank of the second layer's change; 0 trains the whole layer.
        lora_alpha: its factor.
        lora_dropout: its dropout in training.
    """

    hidden_size: int
    num_groups: int = 1
    head: str = "content"
    num_pages: int = 0
    content: bool = True
    decay: bool = True
    graph: bool = True
    history: bool = True
    signals: tuple[str, ...] = ("quest", "sketch")
    embedding_size: int = 48
    mlp_size: int = 64
    lora_rank: int = 4
    lora_alpha: float = 8.0
    lora_dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_groups", "embedding_size", "mlp_size"):
            check_int(name, getattr(self, name), 1, None)
        check_int("lora_rank", self.lora_rank, 0, None)
        if self.head not in HEADS:
            raise ConfigError(
                f"head: got {self.head!r}. Allowed: {', '.join(HEADS)}. Choose one of them."
            )
        if self.head == "absolute":
            check_int("num_pages", self.num_pages, 1, None)
        object.__setattr__(self, "signals", tuple(self.signals))
        strange = set(self.signals) - SIGNALS.keys()
        if strange:
            raise ConfigError(
                f"signals: got {sorted(strange)}. Allowed: {', '.join(sorted(SIGNALS))}. Choose among these."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RouterConfig:
        """Builds a config from plain values; an unknown key raises `ConfigError`."""
        known = {field.name for field in dataclasses.fields(cls)}
        strange = sorted(set(values) - known)
        if strange:
            raise ConfigError(
                f"router config: got unknown keys {strange}. Allowed: {', '.join(sorted(known))}. "
                "Use a file that this version of OVAL wrote."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return dataclasses.asdict(self)


class OutputAwareRouter(nn.Module):
    """Predicts, from the newest last hidden state, the attention mass of each page in the next forward.

    score = hidden-state query . page embedding + what distance, co-occurrence, history and key signals say
    (a linear part for each group and a small network for all). As a `Router` it returns log mass up to a constant.
    """

    name = "output_aware"
    lead: Lead = "step"

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        outputs = config.num_groups * config.embedding_size
        if config.head == "absolute":
            outputs = config.num_groups * config.num_pages
        second: nn.Module = nn.Linear(config.mlp_size, outputs)
        if config.lora_rank:
            alpha, dropout = config.lora_alpha, config.lora_dropout
            second = LoRALinear(config.mlp_size, outputs, config.lora_rank, alpha, dropout)
        size = config.hidden_size
        if config.content:
            self.head = nn.Sequential(
                nn.LayerNorm(size), nn.Linear(size, config.mlp_size), nn.GELU(), second
            )
        if config.content and config.head == "content":
            self.embed = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, config.embedding_size))
            self.content_scale = nn.Parameter(torch.tensor(0.2))
            if config.graph:
                self.graph_conv = GraphConv(config.embedding_size, config.embedding_size)
        features = self._num_features()
        if features:
            self.linear = nn.Parameter(torch.zeros(config.num_groups, features))
            self.mlp = nn.Sequential(nn.Linear(features, 32), nn.GELU(), nn.Linear(32, 1))
            nn.init.zeros_(self._last(self.mlp).weight)
            self._start()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    @property
    def needs(self) -> frozenset[str]:
        """Which optional parts of a `PageView` are read."""
        config = self.config
        needs = set(config.signals)
        if config.content:
            needs |= {"hidden", "page_hidden"} if config.head == "content" else {"hidden"}
        if config.graph:
            needs.add("graph")
        if config.history and FILLS_BY in config.signals:
            needs.add("filled_history")
        return frozenset(needs)

    @property
    def temperature(self) -> torch.Tensor:
        """Sharpness of the distribution over pages; learned, above 0."""
        return self.log_temperature.exp()

    def score(self, view: PageView) -> torch.Tensor:
        """Returns scores [..., G, P]: log mass up to a constant a group."""
        logits = self.logits(view) / self.temperature
        if not self.training:
            return logits
        noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        return logits - (-noise.log()).log() * _GUMBEL  # Gumbel-softmax: a different draw each time

    def forward(self, view: PageView) -> torch.Tensor:
        """Returns `score(view)`."""
        return self.score(view)

    def logits(self, view: PageView) -> torch.Tensor:
        """Returns scores [..., G, P] before temperature and noise."""
        total = torch.zeros_like(view.history.last)
        if self.config.content:
            total = total + self._content(view)
        features = self._features(view)
        if features is not None:
            linear = (features * self.linear[:, None, :]).sum(-1)
            total = total + linear + self.mlp(features)[..., 0]
        return total

    def embed_pages(self, page_hidden: torch.Tensor) -> torch.Tensor:
        """Returns page embeddings [..., E] of mean hidden states [..., C]: a cache makes them once a page."""
        embedded: torch.Tensor = self.embed(page_hidden)
        return embedded

    def _content(self, view: PageView) -> torch.Tensor:
        assert view.hidden is not None, "no hidden state"
        config = self.config
        out = self.head(view.hidden).unflatten(
            -1, (config.num_groups, -1)
        )  # [..., G, E or numbers]
        num_pages = len(view.starts)
        if config.head == "absolute":
            numbers = torch.arange(num_pages, device=out.device).clamp(max=config.num_pages - 1)
            absolute: torch.Tensor = out.index_select(-1, numbers)
            return absolute
        pages = view.page_embedding  # [..., P, E]
        if pages is None:
            assert view.page_hidden is not None, "no page embeddings"
            pages = self.embed_pages(view.page_hidden)
        if config.graph and view.graph is not None:
            pages = pages + self.graph_conv(pages, view.graph)
        content: torch.Tensor = self.content_scale * (out @ pages.transpose(-1, -2))
        return content

    def _features(self, view: PageView) -> torch.Tensor | None:
        config, parts = self.config, []
        if config.history:
            parts.append(history_features(view))
        if config.signals:
            parts.append(signal_features(view, config.signals))
        if config.decay:
            parts.append(place_features(view))
        if config.graph:
            parts.append(graph_feature(view))
        return torch.cat([*parts, lead_feature(view)], -1) if parts else None

    def _num_features(self) -> int:
        config = self.config
        num = _NUM_HISTORY if config.history else 0
        num += len(config.signals) + (NUM_FEATURES if config.decay else 0)
        num += 1 if config.graph else 0
        return num + 1 if num else 0  # and the lead

    def _start(self) -> None:
        """Starts as the mean of what is known to work: last and recent mass, and the signals."""
        with torch.no_grad():
            if self.config.history:
                self.linear[:, :3] = 1.0  # of log / 3: together the mean of last, fast and slow
            first = _NUM_HISTORY if self.config.history else 0
            for i in range(len(self.config.signals)):
                self.linear[:, first + i] = 0.5

    @staticmethod
    def _last(net: nn.Sequential) -> nn.Linear:
        last = net[-1]
        assert isinstance(last, nn.Linear)
        return last

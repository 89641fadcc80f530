"""One prompt, read once, for many policies to go on from: each decodes with a copy of the cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import Attachment, attach
from oval_adapters.bench.recall_routers import Contender
from oval_adapters.bench.recall_values import RecallSettings
from oval_adapters.families import decoder_family
from oval_adapters.hf_cache import OvalCache
from oval_core.config import OvalConfig
from oval_core.metrics import RoutingCounters
from oval_core.policy import FullPolicy
from oval_core.routing.key_signals import SIGNALS
from oval_core.routing.registry import MEASURED_ONLY, create_policy
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.router import Lead
from oval_core.routing.view import PageView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Prefilled", "Run", "runs"]

FULL = "full"


@dataclass(frozen=True, slots=True)
class Run:
    """A policy to decode with.

    Attributes:
        contender: its router; None for full attention.
        policy: `full`, `routed` or `guarded`.
        lead: forwards for which a selection stands; 0 for a router that needs the layer's own query.
        budget: share of the text that a layer reads.
    """

    contender: Contender | None
    policy: str
    lead: int
    budget: float

    @property
    def signal(self) -> str:
        """What the tables call it."""
        return FULL if self.contender is None else self.contender.signal

    @property
    def label(self) -> str:
        """What a progress bar calls it."""
        return f"{self.policy} {self.signal} {self.budget:.0%}"


def runs(found: Sequence[Contender], settings: RecallSettings) -> list[Run]:
    """Returns full attention, then every router under every policy, lead and budget that it can decode with."""
    made = [Run(None, FULL, 0, 1.0)]
    for contender in found:
        made += [
            Run(contender, policy, lead, budget)
            for policy in contender.policies
            for lead in contender.leads(settings.decode_leads)
            for budget in settings.budgets
        ]
    return made


class _PromptReader:
    """Stands for all routers while a prompt is read: asks the cache to keep whatever any of them needs."""

    name = "prompt_reader"
    lead: Lead = "step"

    def __init__(self, wanted: Sequence[Run]) -> None:
        routers = [run.contender.create() for run in wanted if run.contender is not None]
        # all signals: `guarded` checks with one that its router need not know
        known = SIGNALS.keys() - set(MEASURED_ONLY)
        self.needs = frozenset(known).union(*(router.needs for router in routers))

    def score(self, view: PageView) -> torch.Tensor:
        """Is never asked: a prompt is read whole."""
        raise AssertionError("no page is chosen while a prompt is read")


class Prefilled:
    """The prompts of a batch in a cache. End it with `close`.

    Attributes:
        logits: [B, V] after the last token of the prompt.
    """

    def __init__(self, model: PreTrainedModel, oval: Attachment, cache: OvalCache) -> None:
        self.logits = torch.empty(0)
        self._model, self._config, self._cache = model, oval.config, cache
        text = model.get_decoder().config
        self._windows = decoder_family(model.config).windows(text)

    @classmethod
    @contextlib.contextmanager
    def of(
        cls,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        wanted: Sequence[Run],
        settings: RecallSettings,
        room: int,
    ) -> Iterator[Prefilled]:
        """Reads prompts [B, N] until the end of the block.

        Args:
            model: not attached.
            prompt: token ids of equal length.
            wanted: what will be decoded with.
            settings: which layers are routed, and how the prompt is cut into forwards.
            room: tokens that will follow.
        """
        config = OvalConfig(
            policy="routed",
            page_size=settings.page_size,
            routing=settings.routing(1.0),
        )
        with torch.no_grad(), attach(model, config) as oval:
            cache = oval.new_cache(prompt.shape[1] + room, router=_PromptReader(wanted))
            with contextlib.closing(cache):
                prefilled = cls(model, oval, cache)
                # in equal parts: the last one is what the first history is made of
                parts = math.ceil(prompt.shape[1] / settings.chunk)
                for piece in prompt.tensor_split(parts, dim=1):
                    prefilled.logits = forward(model, cache, piece)
                yield prefilled

    @contextlib.contextmanager
    def copy(
        self, run: Run, settings: RecallSettings
    ) -> Iterator[tuple[OvalCache, RoutingCounters]]:
        """Gives a copy of the cache under another policy, and what that policy counts; closed after the block."""
        counters = RoutingCounters()
        if run.contender is None:
            cache = self._cache.copy(FullPolicy())
        else:
            routing = settings.routing(run.budget, max(1, run.lead))
            config = replace(self._config, policy=run.policy, routing=routing)
            policy = create_policy(config, self._windows, run.contender.create(), counters)
            prefilled = self._cache.paged.policy
            assert isinstance(policy, RoutedPolicy)
            assert isinstance(prefilled, RoutedPolicy)
            policy.take_over(prefilled)
            cache = self._cache.copy(policy)
        with contextlib.closing(cache):
            yield cache, counters


def forward(model: PreTrainedModel, cache: OvalCache, ids: torch.Tensor) -> torch.Tensor:
    """Returns float32 logits [B, V] after the last of the tokens [B, T]."""
    output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[:, -1].float()
    return logits

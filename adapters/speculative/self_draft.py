"""Drafts by the target itself, reading only a part of its cache: pages that a router chose, or the first and last tokens.

Shapes: B rows of the cache, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.families import decoder_family
from oval_adapters.routing.resolve import resolve_router
from oval_core.config import RoutingConfig
from oval_core.errors import ConfigError
from oval_core.metrics import RoutingCounters
from oval_core.policy import FullPolicy, SelectionPolicy
from oval_core.routing.registry import create_policy
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.window import WindowPolicy
from oval_core.speculation_config import SpeculationConfig
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache
    from oval_core.routing.router import Router

__all__ = ["SelfDrafter", "check_layers", "watch", "watched_cache"]


def watched_cache(
    oval: Attachment,
    routing: RoutingConfig | None = None,
    router: Router | None = None,
    reserve_tokens: int = 0,
) -> OvalCache:
    """Returns an empty cache that remembers what its pages get, as routers need it, whatever it reads.

    Args:
        oval: the model's attachment.
        routing: see `watch`.
        router: see `watch`.
        reserve_tokens: see `Attachment.new_cache`.
    """
    if oval.config.policy != FullPolicy.name:
        return oval.new_cache(reserve_tokens, router)
    cache = oval.new_cache(reserve_tokens)
    watch(cache, oval, routing, router)
    return cache


def watch(
    cache: OvalCache,
    oval: Attachment,
    routing: RoutingConfig | None = None,
    router: Router | None = None,
) -> None:
    """Lets an empty cache of policy `full` remember what its pages get; it goes on reading everything.

    Args:
        cache: of the attachment; one that watches already stays as it is.
        oval: the model's attachment.
        routing: which layers are watched, in which groups; None takes the defaults.
        router: who will ask; None takes the one that `routing` names.
    Raises:
        ConfigError: the cache holds a text that nobody watched, or the model has no layer to watch.
    """
    if isinstance(cache.paged.policy, RoutedPolicy):
        return
    if cache.is_initialized:
        raise ConfigError(
            f"cache: got one of policy {cache.paged.policy.name!r} with a text that nobody watched. Allowed: an empty one, "
            "or one that watches. Make it with `watched_cache`, or choose speculation.self_policy 'window'."
        )
    whole = replace(routing or RoutingConfig(), budget_share=1.0)
    check_layers("watched_cache: got a cache to watch", "Use `oval.new_cache()`", whole, oval.model)
    router = router or resolve_router(whole, oval.model)
    config = replace(oval.config, policy=RoutedPolicy.name, routing=whole)
    counters = RoutingCounters()  # it reads everything: nothing to tell
    cache.paged.read_by(create_policy(config, _windows(oval.model), router, counters), None)


def check_layers(got: str, instead: str, routing: RoutingConfig, model: PreTrainedModel) -> None:
    """Checks that a model has layers of which a part of the pages can be read, or watched.

    Args:
        got: setting and value that need them, for the message.
        instead: what to do where there are none.
        routing: its `dense_layers` read everything in any case.
        model: the target; its layers with a sliding window read what they always do.
    Raises:
        ConfigError: no layer is left.
    """
    windows = _windows(model)
    whole = [layer for layer, window in enumerate(windows) if window is None]
    if not set(whole) <= set(routing.dense_layers):
        return
    dense = list(routing.dense_layers)
    if whole:
        facts = f"whose only layers without a sliding window, {whole}, are in routing.dense_layers {dense}"
    else:
        facts = f"whose {len(windows)} layers all have a sliding window"
    raise ConfigError(
        f"{got} for a model {facts}. Allowed: models with a layer that has no sliding window and is not in "
        f"routing.dense_layers. {instead}."
    )


class SelfDrafter:
    """Drafts a greedy chain with the target and its own cache; the drafted tokens leave the cache again.

    One forward of the target a drafted token: it pays where reading K and V is what a forward costs.
    """

    name = "self"
    needs_hidden = False

    def __init__(
        self,
        attachment: Attachment,
        config: SpeculationConfig,
        routing: RoutingConfig | None = None,
        router: Router | None = None,
    ) -> None:
        """Makes a drafter; `bind` gives it a cache.

        Args:
            attachment: of the target.
            config: `depth`, `self_policy` and `self_budget` count.
            routing: as the cache's: its layers, groups and sinks count; None takes the attachment's, or the defaults.
            router: as the cache's; None takes the one that `routing` names.
        Raises:
            ConfigError: the model has no layer that could read less.
        """
        self._attachment, self._model, self._depth = attachment, attachment.model, config.depth
        routing = routing or attachment.config.routing or RoutingConfig()
        self._part = replace(routing, token_budget=config.self_budget, budget_share=None)
        check_layers(
            "speculation.drafter: got 'self'",
            "Choose another drafter, such as 'ngram'",
            self._part,
            self._model,
        )
        self._windows = _windows(self._model)
        self._router = self._window = None
        if config.self_policy == WindowPolicy.name:
            self._window = WindowPolicy(self._part, self._windows)
        else:
            self._router = router or resolve_router(self._part, self._model)
        self._cache: OvalCache | None = None

    def bind(self, cache: OvalCache) -> None:
        """Takes the cache of the rows that will be asked for; routed drafts have it watch its pages.

        Raises:
            ConfigError: it holds a text that nobody watched.
        """
        if self._router is not None:
            watch(cache, self._attachment, self._part, self._router)
        self._cache = cache

    def reset(self) -> None:
        """Does nothing: what was drafted left no trace in the cache."""

    @torch.no_grad()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each request, in order, with the last hidden states that predicted its tokens."""
        depths = [
            max(0, min(self._depth, request.max_depth, request.max_nodes - 1))
            for request in requests
        ]
        chains = [[request.ids[-1]] for request in requests]
        states: list[list[torch.Tensor]] = [[] for _ in requests]
        cache = self._bound()
        kept, cache.keeps_hidden = cache.keeps_hidden, True
        with cache.drafting(self._policy(cache)):
            for step in range(max(depths, default=0)):
                going = [i for i, depth in enumerate(depths) if step < depth]
                feeds = [(requests[i].row, chains[i][-1]) for i in going]
                hidden, tokens = self._forward(cache, feeds)
                for i, state, token in zip(going, hidden, tokens, strict=True):
                    states[i].append(state)
                    chains[i].append(token)
        cache.keeps_hidden = kept
        return [
            Draft(TokenTree.chain(chain), torch.stack(own) if own else None)
            for chain, own in zip(chains, states, strict=True)
        ]

    def _bound(self) -> OvalCache:
        assert self._cache is not None, "draft before bind"
        return self._cache

    def _policy(self, cache: OvalCache) -> SelectionPolicy:
        if self._window is not None:
            return self._window
        main = cache.paged.policy
        assert isinstance(main, RoutedPolicy), "the cache watches"
        assert self._router is not None, "made with the drafter"
        policy = RoutedPolicy(self._part, self._windows, self._router, RoutingCounters())
        policy.take_over(main)
        return policy

    def _forward(
        self, cache: OvalCache, feeds: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, list[int]]:
        """Feeds (row, token) pairs; returns last hidden states [rows fed, C] and the greedy tokens after them."""
        device = self._model.device
        sequences = cache.paged.table.sequences
        counts = [0] * len(sequences)
        ids = torch.zeros(len(sequences), 1, dtype=torch.long)
        for row, token in feeds:
            counts[row], ids[row, 0] = 1, token
        places = torch.tensor([[seq.length] for seq in sequences])
        cache.hold(counts)
        output = self._model(
            input_ids=ids.to(device), position_ids=places.to(device), cache=cache, use_cache=True
        )
        cache.accept([list(range(count)) for count in counts])
        rows = [row for row, _ in feeds]
        chosen: list[int] = output.logits[rows, -1].argmax(-1).tolist()
        return cache.last_hidden[rows, -1], chosen


def _windows(model: PreTrainedModel) -> Sequence[int | None]:
    return decoder_family(model.config).windows(model.config.get_text_config(decoder=True))

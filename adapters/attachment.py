"""`attach`: puts a Hugging Face model on the paged cache, and takes it off again without a trace."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.attention_switch import AttentionSwitch
from oval_adapters.cache_checks import check_positions
from oval_adapters.config_files import load_config
from oval_adapters.decoder_calls import check_call, decoder_of, named_arguments, positions_of
from oval_adapters.decoder_run import DecoderRun
from oval_adapters.families import decoder_family, image_family
from oval_adapters.generate import wrap_generate
from oval_adapters.hf_attention import register, unregister
from oval_adapters.hf_cache import OvalCache
from oval_adapters.linears import patch_linears
from oval_adapters.named_parts import check_names
from oval_adapters.patch import OvalCall, Patch
from oval_adapters.routing.resolve import check_router, resolve_router, resolve_sizer
from oval_adapters.speculative.speculative import Speculative
from oval_adapters.vision.piece_ends import PieceEnds
from oval_adapters.vision.prefill_routing import PrefillRouting
from oval_adapters.vision.prefill_settings import create_choice
from oval_adapters.vision.vision import Vision
from oval_adapters.vision.vision_settings import with_vision
from oval_core.attention import create_backend
from oval_core.config import OvalConfig, check_int
from oval_core.errors import CacheMismatchError, ConfigError, UnsupportedModelError
from oval_core.metrics import CacheCounters
from oval_core.paged_cache import PagedCache
from oval_core.routing.registry import create_policy
from oval_core.routing.router import Router
from oval_core.tiers import check_tiers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Attachment", "attach"]

_serial = itertools.count(1)


def attach(
    model: PreTrainedModel,
    config: str | Path | Mapping[str, Any] | OvalConfig | None = None,
) -> Attachment:
    """Puts a model on the paged cache until `detach()` or the end of the `with` block.

    While attached, `model.generate(...)` runs on OVAL; forwards with another cache, or with none, are untouched.

        with attach(model) as oval:
            model.generate(**inputs, max_new_tokens=64)
            print(oval.stats())

    Args:
        model: a causal LM, or LLaVA, from transformers.
        config: a shipped name, a YAML path, a mapping, an `OvalConfig`, or None for the defaults.
    Raises:
        UnsupportedModelError: OVAL cannot promise exact results for this model.
        ConfigError: the configuration is wrong.
        BackendUnavailableError: the backend that was asked for cannot run here.
    """
    return Attachment(model, load_config(config))


class Attachment:
    """A model on the paged cache. Made by `attach`; ended by `detach()` or `with`."""

    def __init__(self, model: PreTrainedModel, config: OvalConfig) -> None:
        self.model = model
        self.counters = CacheCounters()
        self._decoder = decoder_of(model)
        self._text_config = self._decoder.config
        family, images = decoder_family(model.config), image_family(model.config)
        self.config = config = with_vision(config, model.config)
        check_names(config)
        self._windows = family.windows(self._text_config)
        self._drops_cache_above = family.drops_cache_above(self._text_config)
        weight = next(self._decoder.parameters())
        self._backend = create_backend(config.backend, weight.device, weight.dtype)
        self._router = self._sizer = None
        if config.routing is not None:
            self._router = resolve_router(config.routing, model)
            self._sizer = resolve_sizer(config.routing, model, config.page_size)
        create_policy(config, self._windows, self._router)  # an error now, not at the first prompt
        if config.tiers is not None:
            check_tiers(config, len(self._windows))
        self.speculative = Speculative(self)
        self._vision: Vision | None = None
        self.image_routing: PrefillRouting | None = None
        """What prompts read of images; None where they read all."""
        if images is not None and config.vision is not None:
            self._vision = Vision(model.base_model, images, config.vision, self.counters)
            choice = create_choice(config.vision, model)
            if choice is not None:
                self.image_routing = PrefillRouting(choice, self._vision)
                self._vision.keeps_pixels()
        self._name = f"oval-{next(_serial)}"
        self._switch = AttentionSwitch(self._text_config, self._name)
        self._thread = _ThreadState()
        self._patches: list[Patch] = []
        self._caches: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        self._install()

    @property
    def is_attached(self) -> bool:
        """Whether the model still runs on OVAL."""
        return bool(self._patches)

    @property
    def drops_cache_above(self) -> int | None:
        """Columns of text above which the model itself throws its cache away; None for most models."""
        return self._drops_cache_above

    @property
    def backend(self) -> str:
        """Name of the attention backend that `config.backend` was resolved to."""
        return self._backend.name

    def new_cache(self, reserve_tokens: int = 0, router: Router | None = None) -> OvalCache:
        """Returns an empty cache for this model, to pass as `cache=` to a forward or to `generate`.

        Args:
            reserve_tokens: tokens a row to set aside at the first forward; 0 grows by need.
            router: scores pages in place of the router of the settings; for policies that select.
        """
        check_int("reserve_tokens", reserve_tokens, 0, None)
        if router is not None and self.config.routing is not None:
            check_router(router, self.config.routing, self.model.config)
        reserve = self.config.reserve_tokens or reserve_tokens
        paged = PagedCache(
            self.config,
            self._windows,
            create_policy(
                self.config, self._windows, router or self._router, self.counters.routing
            ),
            self._backend,
            counters=self.counters,
            sizer=self._sizer,
        )
        self._caches.add(paged)
        return OvalCache(paged, self._text_config, self._windows, owner=self, reserve=reserve)

    def check_prompt(self, prompt: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Raises `PromptTooLongError` before any work is done; padding does not count."""
        limit = getattr(self._text_config, "max_position_embeddings", None)
        if prompt is None or limit is None or prompt.shape[1] <= limit:
            return
        with_mask = mask is not None and mask.ndim == 2
        longest = int(mask.sum(1).max()) if with_mask else int(prompt.shape[1])
        check_positions(longest, limit)

    def owns(self, cache: object) -> bool:
        """Whether a cache is one that this attachment made."""
        return isinstance(cache, OvalCache) and cache.owner is self

    def stats(self) -> dict[str, Any]:
        """Returns what this attachment did so far: plain numbers and names, ready for JSON.

        `backend`, `linears`: what `auto` became; then the totals of `oval_core.metrics.CacheCounters`, over all
        caches since attach. The first layout of a pool counts as one of `pool_growths`.
        """
        return {
            "backend": self.backend,
            "policy": self.config.policy,
            "linears": self.linears,
            "page_size": self.config.page_size,
            **self.counters.to_dict(),
            **self._routing_stats(),
            **self._tier_stats(),
            **self.speculative.stats(),
            **self._vision_stats(),
        }

    def _vision_stats(self) -> dict[str, Any]:
        if self._vision is None:
            return {}
        routed = {} if self.image_routing is None else self.image_routing.stats()
        return {"vision": {**self._vision.stats(), **routed}}

    @torch.no_grad()
    def read_images(self, cache: OvalCache) -> int:
        """Reads every image token that prompts left unread; returns how many there were.

        They see what lies before them in the text, as if they had been read in their turn; what came after them has not
        seen them.

        Raises:
            ConfigError: what was passed is no cache of this attachment.
        """
        if not self.owns(cache):
            is_other = isinstance(cache, OvalCache)
            got = "one of another attachment" if is_other else type(cache).__name__
            raise ConfigError(
                f"read_images: got {got}. Allowed: a cache that this attachment made. Make it with new_cache() and pass it to "
                "generate(cache=...)."
            )
        if self.image_routing is None:
            return 0
        like = self._decoder.get_input_embeddings().weight
        return self.image_routing.read_all(cache, like, functools.partial(self._run.fill, cache))

    def _routing_stats(self) -> dict[str, Any]:
        routing = self.config.routing
        if routing is None or self._router is None:
            return {}
        facts = {"router": self._router.name, "token_budget": routing.token_budget}
        shared = {"budget_share": routing.budget_share, "coverage": routing.coverage}
        return {"routing": {**facts, **shared, **self.counters.routing.to_dict()}}

    def _tier_stats(self) -> dict[str, Any]:
        tiers = self.config.tiers
        if tiers is None:
            return {}
        facts = {"fast_tokens": tiers.fast_tokens, "prefetch": tiers.prefetch, "disk": tiers.disk}
        link = "modelled link" if tiers.is_modelled_link else "real"
        return {"tiers": {**facts, "link": link, **self.counters.tiers.to_dict()}}

    def detach(self) -> None:
        """Takes the model off OVAL: methods, attention registry and config are as they were. Twice is harmless."""
        for patch in self._patches:
            patch.check()
        for patch in reversed(self._patches):
            patch.undo()
        if self._patches:
            self._switch.restore()
            unregister(self._name)
        self._patches = []
        if self._vision is not None:
            self._vision.clear()
        for paged in self._caches:
            paged.rest()  # a cache that is still held can be read, and no thread waits for more

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    @contextlib.contextmanager
    def generating(self, prompt: torch.Tensor | None = None, cached: int = 0) -> Iterator[None]:
        """Marks that `generate` runs with an OVAL cache: a model that drops it is then found out.

        Args:
            prompt: text that the call brings, ids [B, L] or embeddings [B, L, C]; pieces of a long one are read as the
                whole would be.
            cached: of its columns, those that the cache holds already.
        """
        columns = 0 if prompt is None else int(prompt.shape[1])
        state, before = self._thread, self._thread.prompt_columns
        state.generate_depth += 1
        state.prompt_columns = columns if self._is_long(cached, columns - cached) else 0
        sees = contextlib.nullcontext() if self._vision is None else self._vision.generating(prompt, cached)  # fmt: skip
        try:
            with sees:
                yield
        finally:
            state.generate_depth -= 1
            state.prompt_columns = before

    def _is_long(self, cached: int, num_queries: int) -> bool:
        """Whether policies that select read so many new columns whole."""
        routing = self.config.routing
        return routing is not None and (not cached or num_queries > routing.max_queries)

    def _install(self) -> None:
        for module, name in ((self._decoder, "forward"), (self.model, "generate")):
            if isinstance(getattr(module, name), OvalCall):
                raise UnsupportedModelError(
                    "this model is attached already. Allowed: one attach at a time. Call detach() on the first."
                )
        self.linears, linears = patch_linears(
            self.model, self._decoder, self.config.linears, lambda: self._thread.on_oval
        )
        register(self._name)
        self._patches = [
            Patch(self._decoder, "forward", self._wrap_forward),
            Patch(self.model, "generate", functools.partial(wrap_generate, self)),
            *([] if self._vision is None else self._vision.install()),
            *linears,
        ]

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._run = DecoderRun(self, self._switch, original)
        return lambda *args, **kwargs: self._forward(original, args, kwargs)

    def _forward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One forward of the decoder: plan, run on OVAL's attention, commit. Any error takes it back."""
        named = {**named_arguments(self._decoder, args), **kwargs} if args else kwargs
        cache = named.get("cache", named.get("past_key_values"))
        states = named.get("inputs_embeds")
        if states is None:
            states = named.get("input_ids")
        self._thread.on_oval = isinstance(cache, OvalCache)
        if not isinstance(cache, OvalCache):
            if cache is None and states is not None:
                self._check_dropped(states.shape[1])
            with self._switch.plain():
                return original(*args, **kwargs)
        if states is None:
            raise CacheMismatchError(
                "forward: got neither input_ids nor inputs_embeds. Allowed: one of them. Pass the new tokens."
            )
        check_call(named, self._text_config)
        rows, num_queries = states.shape[:2]
        if not num_queries:
            raise CacheMismatchError(
                f"forward: got no new token, {cache.get_seq_length()} are cached. Allowed: one a row at least. Pass a prompt, "
                "or the whole text so far and what follows it."
            )
        cached = cache.get_seq_length()
        images = [] if self._vision is None else self._vision.parts(num_queries, cached)
        unread = None
        if self.image_routing is not None:
            fill = functools.partial(self._run.fill, cache)
            unread = self.image_routing.plan(cache, named, images, fill)
        ends = PieceEnds(cache.paged, rows, num_queries, images, unread)
        if cache.is_held or ends.after(0) == num_queries:
            is_prompt = cached < self._thread.prompt_columns and not cache.is_held
            output = self._run.whole(cache, named, states, is_prompt, images, unread)
        else:
            is_long = self._is_long(cached, num_queries)
            wants_tuple = named.get("return_dict", self._text_config.return_dict) is False
            output = self._run.in_pieces(
                cache, named, states, ends.after, is_long, images, unread, wants_tuple=wants_tuple
            )
        if any(images):
            cache.image_views.add(cached, images, positions_of(named, states, cached))
        return output

    def _check_dropped(self, num_tokens: int) -> None:
        limit = self._drops_cache_above
        if self._thread.generate_depth and limit is not None and num_tokens > limit:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} throws its cache away where a text outgrows {limit} tokens "
                f"(original_max_position_embeddings): got {num_tokens}. Allowed with OVAL: up to {limit}. "
                "Shorten the text, or pass use_oval=False."
            )


class _ThreadState(threading.local):
    """What the current thread is doing with the model."""

    generate_depth = 0
    prompt_columns = 0
    """Columns of the running `generate` that are its prompt, or a long turn: forwards that begin there belong to it."""
    on_oval = False
    """Whether its last decoder forward used an OVAL cache; the LM head runs after it."""

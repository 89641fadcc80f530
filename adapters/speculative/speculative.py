"""`oval.speculative`: what `generate(custom_generate=...)` calls. Makes ready, runs the loop, hands out what came."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative.door import check_call, check_drafter, check_mask
from oval_adapters.speculative.drafters import MadeDrafter, create_drafter
from oval_adapters.speculative.loop import NodeLimits, SpeculativeRun
from oval_adapters.speculative.pace import Costs, Pace
from oval_adapters.speculative.page_fusion import PageFusion
from oval_adapters.speculative.prompt import emit_first, read_prompt
from oval_adapters.speculative.row_processors import processors_by_row
from oval_adapters.speculative.rows import Rows
from oval_adapters.speculative.self_draft import check_layers, watch
from oval_core.config import RoutingConfig
from oval_core.routing.routed import RoutedPolicy
from oval_core.speculation_config import SpeculationConfig
from oval_spec.acceptance import AcceptanceCounters
from oval_spec.drafter import NullDrafter
from oval_spec.fusion_trial import FusionTrial
from oval_spec.turn_off import SpeculationSwitch
from oval_spec.verify import create_verifier

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

    from oval_adapters.attachment import Attachment
    from oval_spec.drafter import Drafter

__all__ = ["Speculative"]

_log = logging.getLogger(__name__)


class Speculative:
    """Speculative decoding for `model.generate(..., custom_generate=oval.speculative)`.

    The text is the one that plain decoding gives, or drawn from the same distribution, unless the settings ask for typical
    acceptance. Everything that `generate` takes works, but for what is refused by name.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._drafters: dict[SpeculationConfig, MadeDrafter] = {}
        self._costs: dict[tuple[SpeculationConfig, str, int], Costs] = {}
        self._counters = AcceptanceCounters()
        self._running: dict[int, AcceptanceCounters] = {}
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        oval_drafter: Drafter | None = None,
        streamer: BaseStreamer | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decodes; called by `generate`, which makes most of the arguments.

        Args:
            model: the attached model.
            input_ids: [B, L].
            logits_processor: of the whole batch.
            stopping_criteria: asked after each token of a row.
            generation_config: of this call.
            speculation: settings of this call; None takes the attachment's, or the defaults.
            oval_drafter: drafts in this call, in place of the drafter that the settings name.
            streamer: gets the tokens in order.
            target_tokenizer: to compare a draft model's tokenizer with.
            **model_kwargs: inputs of the model, an OVAL cache among them.
        Raises:
            ConfigError: the call asks for what speculation cannot do exactly, or the settings are wrong.
        """
        cache = cast("OvalCache", model_kwargs.get("cache"))
        check_call(self._attachment, model, logits_processor, generation_config, cache)
        check_mask(cache, model_kwargs.get("attention_mask"))
        config = self._settings(speculation)
        do_sample = bool(generation_config.do_sample)
        verifier = create_verifier(config, do_sample)
        rows = _rows(input_ids, model_kwargs, stopping_criteria, generation_config, streamer)
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(
                self._drafting(cache, config, oval_drafter, target_tokenizer)
            )
            pace = stack.enter_context(self._pace(made, config, rows.num_rows))
            facts = {"drafter": made.drafter.name, "heads": made.report}
            self._facts = {**facts, "lossless": verifier.is_lossless}
            fusion = self._fusion(stack, cache, made.drafter, config, pace.fusion_trial)
            prompt = read_prompt(model, cache, input_ids, generation_config, model_kwargs)
            emit_first(rows, input_ids, prompt.logits, logits_processor, do_sample=do_sample)
            run = SpeculativeRun(
                model,
                cache,
                rows,
                processors_by_row(logits_processor, rows.num_rows),
                verifier,
                pace,
                self._limits(cache, rows.num_rows),
                prompt,
                fusion,
            )
            with model._optimize_model_for_decode():
                run.finish()
        return _output(rows, cache, generation_config)

    def stats(self) -> dict[str, Any]:
        """Returns what all calls did so far, in plain values, under `speculation`; nothing before the first call.

        The counts are those of `AcceptanceCounters.to_dict`; `drafter`, `lossless`, `heads` (what was found in
        their folder), `fusion` and whether speculation `is_off` are of the last call, and `switched` is what was said when it was turned off
        or on again.
        """
        if not self._facts:
            return {}
        total = AcceptanceCounters()
        with self._lock:
            for counters in (self._counters, *self._running.values()):
                total.merge(counters)
        return {"speculation": {**self._facts_now(), **total.to_dict()}}

    def _facts_now(self) -> dict[str, Any]:
        switches = [(costs.switch.is_off, costs.said) for costs in list(self._costs.values())]
        is_off, said = switches[-1] if switches else (False, None)
        facts = {**self._facts, "is_off": is_off, "switched": said}
        if "fusion" in facts:
            facts["fusion"] = asdict(facts["fusion"])
        return facts

    def _settings(self, given: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig:
        if given is not None:
            return SpeculationConfig.from_dict(given)
        return self._attachment.config.speculation or SpeculationConfig()

    @contextlib.contextmanager
    def _drafting(
        self,
        cache: OvalCache,
        config: SpeculationConfig,
        given: Drafter | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> Iterator[MadeDrafter]:
        """Lends the drafter of some settings, and has the cache keep the hidden states that it needs."""
        check_drafter(given)
        made = None if given is None else MadeDrafter(given)
        if made is None:  # taken off the shelf: a call in another thread makes its own
            made = self._drafters.pop(config, None)
        if made is None:
            made = create_drafter(self._attachment, config, tokenizer)
        kept, cache.keeps_hidden = cache.keeps_hidden, made.drafter.needs_hidden
        made.drafter.reset()
        try:
            yield made
        finally:
            cache.keeps_hidden = kept
            made.drafter.reset()
            if given is None and not hasattr(made.drafter, "bind"):
                self._drafters[config] = made

    def _fusion(
        self,
        stack: contextlib.ExitStack,
        cache: OvalCache,
        drafter: Drafter,
        config: SpeculationConfig,
        trial: FusionTrial,
    ) -> PageFusion | None:
        """Binds a drafter that reads the target's cache, and returns what fetches pages before verifications, if anything.

        It ends with the stack, also where the prompt cannot be read to its end.
        """
        bind = getattr(drafter, "bind", None)
        if bind is not None:
            bind(cache)
        own, order = self._attachment.config, config.fusion
        measures = order == "auto" and own.policy != "full"
        if order == "auto":
            order = trial.order if measures else "none"
        if own.tiers is None or (order == "none" and not measures):
            return None
        if not cache.is_initialized:
            whole = own.routing or RoutingConfig()
            got, instead = f"speculation.fusion: got {order!r}", "Choose fusion 'none'"
            check_layers(got, instead, whole, self._attachment.model)
            watch(cache, self._attachment)
        if not isinstance(cache.paged.policy, RoutedPolicy):
            _log.warning(
                "speculation.fusion: %r is not used: the cache holds a text that nobody watched",
                order,
            )
            return None
        fusion = PageFusion(cache, order, trial=trial if measures else None)
        stack.callback(fusion.end)
        self._facts = {**self._facts, "fusion": fusion.counters}
        return fusion

    @contextlib.contextmanager
    def _pace(self, made: MadeDrafter, config: SpeculationConfig, rows: int) -> Iterator[Pace]:
        """Lends what was measured with such settings, and adds what the call counts to the totals, however it ends.

        As with drafters, a call in another thread begins with measurements of its own: two calls share no clock.
        """
        key = (config, made.drafter.name, rows)
        turns_off = config.turns_off and not isinstance(made.drafter, NullDrafter)
        costs = self._costs.pop(key, None) or Costs(SpeculationSwitch(turns_off))
        counters = AcceptanceCounters()
        with self._lock:
            self._running[id(counters)] = counters
        try:
            yield Pace(made, config, costs, counters, rows)
        finally:
            with self._lock:
                del self._running[id(counters)]
                self._counters.merge(counters)
            self._costs[key] = costs  # the last one is of the last call

    def _limits(self, cache: OvalCache, rows: int) -> NodeLimits:
        routing = self._attachment.config.routing
        limits = [cache.max_new_tokens(rows), None if routing is None else routing.max_queries]
        text = self._attachment.model.config.get_text_config(decoder=True)
        return NodeLimits(
            nodes=min((limit for limit in limits if limit is not None), default=None),
            positions=getattr(text, "max_position_embeddings", None),
            kept_columns=self._attachment.drops_cache_above,
            tokens=len(self._attachment.model.get_input_embeddings().weight),
        )


def _output(
    rows: Rows, cache: OvalCache, config: GenerationConfig
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    if not config.return_dict_in_generate:
        return rows.sequences()
    return GenerateDecoderOnlyOutput(
        sequences=rows.sequences(), scores=rows.scores(), logits=rows.logits(), cache=cache
    )


def _rows(
    input_ids: torch.Tensor,
    inputs: Mapping[str, Any],
    criteria: StoppingCriteriaList,
    settings: GenerationConfig,
    streamer: BaseStreamer | None,
) -> Rows:
    # As plain decoding has it: without an end token, rows that a criterion ended are not padded.
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = settings._pad_token_tensor if pads else None
    keeps = bool(settings.return_dict_in_generate)
    return Rows(
        input_ids,
        inputs.get("attention_mask"),
        criteria,
        None if pad is None else int(pad),
        streamer,
        keeps_scores=keeps and bool(settings.output_scores),
        keeps_logits=keeps and bool(settings.output_logits),
    )

"""One call of `generate` with a clock: the text, when its tokens came, and what the cache did. Prints nothing."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.attachment import attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

    from oval_core.config import OvalConfig

__all__ = ["INTERRUPTED", "TimedText", "TokenClock", "generate_timed"]

INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedText:
    """What one call generated.

    Attributes:
        text: the new text, special tokens left out.
        new_tokens: tokens generated, the end token included.
        prompt_tokens: tokens of the prompt.
        tokens_per_s: of decode steps only; None where there was none.
        prefill_s: from the start to the first token; None if none came.
        decode_ms_p50: median of the decode steps; None where there was none.
        finish_reason: `stop` (end token), `length` or `interrupted`.
        stats: the attachment's; without OVAL the name of the attention alone.
    """

    text: str
    new_tokens: int
    prompt_tokens: int
    tokens_per_s: float | None
    prefill_s: float | None
    decode_ms_p50: float | None
    finish_reason: str
    stats: dict[str, Any]


class TokenClock:
    """A streamer that notes when each token came, and hands everything on to another streamer."""

    def __init__(self, inner: BaseStreamer | None, on_token: Callable[[], None] | None) -> None:
        self._inner, self._on_token = inner, on_token
        self._begin: float | None = None
        self._times: list[float] = []
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then each token."""
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        else:
            self._times.append(now)
            self.token_ids.extend(value.flatten().tolist())
            if self._on_token is not None:
                self._on_token()
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """Lets the inner streamer print what it held back."""
        if self._inner is not None:
            self._inner.end()

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the prompt to the first token."""
        if self._begin is None or not self._times:
            return None
        return self._times[0] - self._begin

    @property
    def step_s(self) -> list[float]:
        """Seconds of each token after the first."""
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]


def generate_timed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    arguments: Mapping[str, Any],
    config: OvalConfig | None,
    streamer: BaseStreamer | None = None,
    on_token: Callable[[], None] | None = None,
) -> TimedText:
    """Generates once. Ctrl-C ends it early and keeps what came so far.

    Args:
        model: not attached.
        tokenizer: turns the tokens into text.
        ids: prompt [1, T] without padding.
        arguments: for `model.generate`.
        config: of the attachment, with speculation if it has any; None runs plain Hugging Face.
        streamer: gets each token as it comes.
        on_token: called before it.
    """
    clock, finish = TokenClock(streamer, on_token), ""
    with contextlib.nullcontext() if config is None else attach(model, config) as oval:
        if oval is not None and oval.config.speculation is not None:
            arguments = {**arguments, "custom_generate": oval.speculative}
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **arguments)
        except KeyboardInterrupt:
            finish = INTERRUPTED
            if clock.token_ids:
                clock.end()
        plain = {"backend": f"transformers {model.config._attn_implementation}"}
        stats = plain if oval is None else oval.stats()
    tokens, steps, prefill_s = clock.token_ids, clock.step_s, clock.prefill_s
    return TimedText(
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        new_tokens=len(tokens),
        prompt_tokens=ids.shape[1],
        tokens_per_s=round(len(steps) / sum(steps), 3) if steps else None,
        prefill_s=None if prefill_s is None else round(prefill_s, 4),
        decode_ms_p50=round(statistics.median(steps) * 1e3, 3) if steps else None,
        finish_reason=finish or ("stop" if _ends(model, tokens) else "length"),
        stats=stats,
    )


def _ends(model: PreTrainedModel, tokens: list[int]) -> bool:
    ends = model.generation_config.eos_token_id
    return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])

"""Trains a `DynamicPageSizer`: pages should hold tokens that later queries attend to alike.

Shapes: T tokens of a prompt, C hidden size, S steps after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from oval_adapters.routing.record_many import TokenRecording
from oval_adapters.training.sizer_settings import SizerTraining
from oval_core.routing.page_sizer import DynamicPageSizer, sizing_loss

__all__ = ["Progress", "SizerResult", "page_variance", "train_sizer"]

Progress = Callable[[str, int, int], None]


@dataclass(kw_only=True, slots=True)
class SizerResult:
    """What came out of a training.

    Attributes:
        sizer: the best on validation, in evaluation mode.
        curve: one entry a validation: updates, mean training loss since the last one (nan for the first), and
            `page_variance` of held-out passages under the sizer and under pages of equal size.
    """

    sizer: DynamicPageSizer
    curve: list[dict[str, float]] = field(default_factory=list)


def page_variance(sizes: Sequence[int], attention: torch.Tensor) -> float:
    """Returns how much log attention varies within pages of these sizes: `sizing_loss` of pages as they are served.

    Args:
        sizes: T together.
        attention: [S, T].
    """
    page_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    shares = torch.nn.functional.one_hot(page_of, len(sizes)).float()
    return float(sizing_loss(shares, attention))


def train_sizer(
    recordings: Sequence[TokenRecording],
    held_out: Sequence[TokenRecording],
    settings: SizerTraining,
    progress: Progress,
) -> SizerResult:
    """Trains on some recordings and keeps what is best on the others; at worst that is the untrained sizer.

    Args:
        recordings: prompts with the attention that their tokens received.
        held_out: others to judge by.
        settings: updates, learning rate, page size, seed.
        progress: called after each update.
    """
    train = [_without_sinks(own, settings.num_sink_tokens) for own in recordings]
    judged = [_without_sinks(own, settings.num_sink_tokens) for own in held_out]
    sizer = DynamicPageSizer(recordings[0].hidden.shape[1], settings.page_size)
    optimizer = torch.optim.AdamW(sizer.parameters(), lr=settings.learning_rate, weight_decay=0.02)
    result = SizerResult(sizer=sizer)
    best = _validate(result, 0, math.nan, judged)
    state = _state(sizer)
    order = random.Random(settings.seed)
    losses: list[float] = []
    for done in range(1, settings.updates + 1):
        own = order.choice(train)
        loss = sizing_loss(sizer.soft_assign(own.hidden), own.attention)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(sizer.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(done / settings.updates)
        optimizer.step()
        losses.append(float(loss.detach()))
        progress("training", done, settings.updates)
        if done % settings.validate_every == 0 or done == settings.updates:
            variance = _validate(result, done, sum(losses) / len(losses), judged)
            losses.clear()
            if variance < best:
                best, state = variance, _state(sizer)
    sizer.load_state_dict(state)
    sizer.eval()
    return result


def _validate(
    result: SizerResult, updates: int, loss: float, held_out: Sequence[TokenRecording]
) -> float:
    """Adds an entry to the curve; returns the variance within the sizer's pages."""
    own, fixed = [], []
    mean_size = result.sizer.mean_size
    for recording in held_out:
        count = len(recording.hidden)
        equal = [min(mean_size, count - start) for start in range(0, count, mean_size)]
        own.append(page_variance(result.sizer.sizes(recording.hidden), recording.attention))
        fixed.append(page_variance(equal, recording.attention))
    entry = {"updates": updates, "loss": loss, "sizer": _mean(own), "fixed": _mean(fixed)}
    result.curve.append(entry)
    return entry["sizer"]


def _without_sinks(recording: TokenRecording, num_tokens: int) -> TokenRecording:
    attention = recording.attention.clone()
    attention[:, :num_tokens] = 0.0  # weighs nothing: read anyway, and they get most of all mass
    return TokenRecording(recording.hidden, attention)


def _state(sizer: DynamicPageSizer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in sizer.state_dict().items()}


def _rate(share: float) -> float:
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

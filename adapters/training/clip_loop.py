"""The training loop of a small CLIP: open_clip's loss over new scenes, judged by retrieval. D of the joint space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oval_adapters.training.clip_lessons import Pair, naming_pairs, pairs_at, scene_pairs
from oval_adapters.training.clip_model import SmallClip, open_clip_library
from oval_adapters.training.clip_settings import ClipTraining
from oval_adapters.training.resumable_loop import ResumableLoop, Tick, rate_share
from oval_mm.scenes import Library, draw

__all__ = ["ClipTrainer", "retrieval"]

MOST_SCALE = math.log(100)
"""Bound of the logarithm of the logits' scale, CLIP's own."""
_PICTURES = 64
"""Pictures that a validation embeds at once."""


class ClipTrainer(ResumableLoop):
    """One training.

    Attributes:
        clip: what learns.
    """

    def __init__(
        self,
        clip: SmallClip,
        library: Library,
        settings: ClipTraining,
        *,
        identity: dict[str, Any],
        tick: Tick,
        log: Callable[[list[dict[str, Any]]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Makes what a run needs; arguments that are not named here as in `ResumableLoop`.

        Args:
            clip: new.
            library: of the scenes.
        """
        self.clip, self._library, self._training = clip, library, settings
        self._loss = open_clip_library().ClipLoss()
        optimiser = torch.optim.AdamW(
            _groups(clip.model, settings.weight_decay), lr=settings.rate, betas=(0.9, 0.98)
        )
        super().__init__(
            settings, optimiser, identity=identity, tick=tick, log=log, is_stopping=is_stopping
        )
        self._checks = {
            name: {
                "scenes": scene_pairs(library, settings, held_out=held_out),
                "naming": naming_pairs(library, settings, held_out=held_out),
            }
            for name, held_out in (("known", False), ("never_seen", True))
        }

    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """See `ResumableLoop`."""
        return list(self.clip.model.named_parameters())

    def update(self, progress: float) -> tuple[float, int]:
        """See `ResumableLoop`."""
        pairs = pairs_at(self._library, self._training, self.done)
        model = self.clip.model.train()
        for group in self._optimiser.param_groups:
            group["lr"] = self._training.rate * rate_share(self.done, progress)
        self._optimiser.zero_grad(set_to_none=True)
        seen, said = self._embed(pairs)
        loss = self._loss(seen, said, model.logit_scale.exp())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimiser.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, MOST_SCALE)
        return loss.item(), len(pairs)

    @torch.no_grad()
    def measure(self, tick: Tick) -> dict[str, Any]:
        """Returns by part of the split, then by sort of check, what `retrieval` says.

        Args:
            tick: told how many pictures are done.
        """
        self.clip.model.eval()
        whole = sum(len(pairs) for checks in self._checks.values() for pairs in checks.values())
        label, before = f"validating after {self.done} updates", 0
        found: dict[str, Any] = {}
        for part, checks in self._checks.items():
            found[part] = {}
            for sort, pairs in checks.items():
                parts = [self._embed(pairs[at : at + _PICTURES]) for at in range(0, len(pairs), _PICTURES)]  # fmt: skip
                seen, said = (torch.cat(own) for own in zip(*parts, strict=True))
                found[part][sort] = retrieval(seen, said)
                before += len(pairs)
                tick(label, before, whole)
        return found

    def _embed(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the embeddings of pictures and of captions, each [pairs, D]."""
        side = self._training.image_size
        pictures = [draw(pair.scene, self._library, side) for pair in pairs]
        return self.clip.pictures(pictures), self.clip.texts([pair.caption for pair in pairs])


def retrieval(seen: torch.Tensor, said: torch.Tensor) -> dict[str, Any]:
    """Returns how often the nearest is the right one.

    Args:
        seen: embeddings of pictures, [B, D].
        said: of their captions, [B, D].

    Returns:
        `pairs` (B), `top1` (share of pictures whose own caption is nearest), `picture_top1` (of captions whose own picture
        is nearest), `chance`.
    """
    near = seen @ said.T
    own = torch.arange(len(near))
    return {
        "pairs": len(near),
        "top1": (near.argmax(1) == own).float().mean().item(),
        "picture_top1": (near.argmax(0) == own).float().mean().item(),
        "chance": 1 / len(near),
    }


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the weights by whether they decay: matrices do.

    Embeddings do not: most of the vocabulary is in no caption, and what is never learnt would fade away.
    """
    plain = ("embedding", "logit_scale")
    named = list(model.named_parameters())
    spared = {name for name, p in named if p.ndim < 2 or any(word in name for word in plain)}
    return [
        {"params": [p for name, p in named if name not in spared], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]

"""A first projector without the decoder: patches of a thing become the embedding of its name. D vision, C text size.

It costs minutes where the decoder costs hours, and leaves to the decoder's loss what embeddings cannot say. Patches of the
ground become the embedding of its colour; all become a little like the word for their side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from oval_mm.scenes import COLOURS, Library, Scene, coverage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Aligned", "align_projector", "patch_words", "word_embeddings"]

_SHARPNESS = 12.0
_SIDE_WEIGHT = 0.2
_DISTANCE_WEIGHT = 0.2
_COVERED = 0.35
"""A patch shows a thing that covers so much of it."""
_GROUND = 0.1
"""A patch shows the ground where things cover less than this."""
_NONE = -1
_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Aligned:
    """How well patches find their words.

    Attributes:
        updates: in all.
        loss: at the end, smoothed.
        accuracy: share of a last batch's patches whose own word is nearest, of all words.
    """

    updates: int
    loss: float
    accuracy: float


def word_embeddings(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase, table: torch.Tensor
) -> torch.Tensor:
    """Returns the mean embedding of each word's tokens inside a sentence, float32 [words, C].

    Args:
        words: names.
        tokenizer: of the decoder.
        table: its embeddings, [V, C].
    """
    ids = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word in words]
    return torch.stack([table[torch.tensor(one)].float().mean(0) for one in ids])


def patch_words(
    scenes: Sequence[Scene], library: Library, words: Sequence[str], grid: tuple[int, int]
) -> torch.Tensor:
    """Returns which word each patch shows, int64 [scenes, N]; -1 where none or several do."""
    place = {word: number for number, word in enumerate(words)}
    found = torch.full((len(scenes), grid[0] * grid[1]), _NONE)
    for at, scene in enumerate(scenes):
        shares = torch.from_numpy(coverage(scene, library, *grid)).flatten(1)
        most, which = shares.max(0)
        named = torch.tensor([place[one.cutout.name] for one in scene.placed])
        found[at] = torch.where(most >= _COVERED, named[which], found[at])
        found[at][shares.sum(0) < _GROUND] = place[scene.colour]
    return found


def align_projector(
    projector: nn.Module,
    features: torch.Tensor,
    shown: torch.Tensor,
    words: torch.Tensor,
    sides: torch.Tensor,
    *,
    columns: int,
    updates: int,
    rate: float,
    seed: int,
    tick: Callable[[int], None],
) -> Aligned:
    """Trains a projector in place.

    Args:
        projector: [..., D] to [..., C].
        features: standardised, [pictures, N, D].
        shown: from `patch_words`, [pictures, N].
        words: embeddings, [W, C].
        sides: embeddings of left and right, [2, C].
        columns: patches of a row.
        updates: of 64 pictures each.
        rate: learning rate at its highest.
        seed: of the order.
        tick: told how many updates are done.
    """
    middle = words.mean(0)
    aims = F.normalize(words - middle, dim=1)
    side_aims = F.normalize(sides - sides.mean(0), dim=1)
    spread = (words - middle).norm(dim=1).mean()
    right = (torch.arange(shown.shape[1]) % columns >= columns / 2).long()
    optimiser = torch.optim.AdamW(projector.parameters(), lr=rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=max(2, updates))
    rng = random.Random(f"align/{seed}")
    loss_value = accuracy = 0.0
    for update in range(updates):
        picked = torch.tensor(rng.sample(range(len(features)), min(64, len(features))))
        target = shown[picked]
        is_shown = target != _NONE
        is_shown &= (target < len(words) - len(COLOURS)) | (torch.rand(target.shape, generator=torch.Generator().manual_seed(update)) < 0.3)  # fmt: skip
        out = projector(features[picked][is_shown].float())
        target, side = target[is_shown], right.expand(len(picked), -1)[is_shown]
        near = F.normalize(out - middle, dim=1) @ aims.T
        loss = F.cross_entropy(_SHARPNESS * near, target)
        loss = loss + _SIDE_WEIGHT * F.cross_entropy(_SHARPNESS * F.normalize(out - middle, dim=1) @ side_aims.T, side)  # fmt: skip
        loss = loss + _DISTANCE_WEIGHT * ((out - words[target]) / spread).square().sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        loss_value = loss.item() if update == 0 else 0.95 * loss_value + 0.05 * loss.item()
        accuracy = (near.argmax(1) == target).float().mean().item()
        tick(update + 1)
    return Aligned(updates, loss_value, accuracy)

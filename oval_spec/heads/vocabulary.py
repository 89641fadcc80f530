"""Draft vocabulary: the target tokens that draft heads may propose. V' draft tokens, V target tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oval_core.errors import ConfigError

IGNORED = -100
"""Label of a target token that the draft vocabulary lacks: what cross entropy ignores by default."""


class DraftVocabulary:
    """Maps draft ids 0..V'-1 to target ids and back (vLLM's `token_map`).

    A smaller vocabulary makes the LM head over drafted states cheap; a token that it lacks is never drafted, which
    costs acceptance there and changes no output.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        """Keeps the ids in the order given.

        Args:
            token_ids: target ids [V'], any whole-number dtype, each once.
            vocab_size: V of the target.
        """
        ids = token_ids.detach().cpu()
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool or not len(ids):
            raise ConfigError(
                f"draft vocabulary: got {list(ids.shape)} of {ids.dtype}. Allowed: a list of one or more token ids. "
                "Give the target ids of the draft tokens."
            )
        ids = ids.long()
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ConfigError(
                f"draft vocabulary: got token {low if low < 0 else high}. Allowed: 0 to {vocab_size - 1}, the target's "
                "tokens. Use the vocabulary that was made for this model."
            )
        counts = ids.bincount()
        if int(counts.max()) > 1:
            raise ConfigError(
                f"draft vocabulary: got token {int(counts.argmax())} more than once. Allowed: each token once. Drop the "
                "second ones."
            )
        self.token_ids = ids  # [V'], on the CPU
        self.vocab_size = vocab_size
        self._on_device = ids
        self._draft_ids = torch.full((vocab_size,), IGNORED)
        self._draft_ids[ids] = torch.arange(len(ids))

    @classmethod
    def from_counts(
        cls, tokens: torch.Tensor | Iterable[int], size: int, vocab_size: int
    ) -> DraftVocabulary:
        """Returns the `size` most frequent tokens of a text (all of them if it has fewer), sorted by token id.

        Args:
            tokens: target ids, any shape, as often as they occur.
            size: largest V'.
            vocab_size: V of the target.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"draft vocabulary: got size {size!r}. Allowed: a whole number, 1 or more. Give one."
            )
        given = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(list(tokens))
        flat = given.detach().cpu().reshape(-1).long()
        if not len(flat) or int(flat.min()) < 0 or int(flat.max()) >= vocab_size:
            got = "no tokens" if not len(flat) else f"tokens {int(flat.min())} to {int(flat.max())}"
            raise ConfigError(
                f"draft vocabulary: got {got} to count. Allowed: one or more, 0 to {vocab_size - 1}. Count the target's "
                "tokens."
            )
        counts = flat.bincount(minlength=vocab_size)
        order = counts.argsort(descending=True, stable=True)[:size]
        return cls(order[counts[order] > 0].sort().values, vocab_size)

    def __len__(self) -> int:
        return len(self.token_ids)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target ids of draft ids, same shape, on their device."""
        if self._on_device.device != draft_ids.device:
            self._on_device = self.token_ids.to(draft_ids.device)
        return self._on_device[draft_ids]

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Returns the draft ids of target ids, same shape, on the CPU; `IGNORED` for tokens that it lacks."""
        ids = target_ids.cpu().long()
        return torch.where(ids < 0, IGNORED, self._draft_ids[ids.clamp(min=0)])

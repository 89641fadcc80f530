"""What all draft heads are: states in the target's hidden space from a hidden state and a drafted path, and logits of them.

Head k (from 0) predicts the token k + 2 places after the one whose hidden state is given: place 1 is the root's, which the
target chose. Shapes: R rows (paths), C hidden size, K heads, W context tokens, S width of what a path carries, V vocabulary
of the target, V' of the drafts (V without a draft vocabulary).

    carried = heads.start(hidden [R, C], context [R, W, C])
    for k in range(K):
        carried = heads.step(carried, embedding of the k-th token of the path [R, C], k)   # k = 0: the root
        states = heads.read(carried, k)       # [R, C]: expected hidden state at that token
        logits = heads.logits(states, k)      # [R, V'] of the token after it

`forward` does the same teacher-forced. Before `embed` and `logits`, `bind` hands in the base's weights; these are never
parameters, never saved, and not moved by `.to()`. Heads may have another dtype than the base (float32 in training).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.errors import ConfigError
from oval_core.native.few_rows import few_rows_linear
from oval_spec.heads.facts import BaseWeights
from oval_spec.heads.vocabulary import DraftVocabulary


class DraftHeads(nn.Module, ABC):
    """Draft heads of any kind.

    Attributes:
        kind: name in files.
        is_sequential: whether head k sees the drafted path; if not, all paths of a row share its states.
        num_heads: K.
        hidden_size: C.
        context: W, tokens before the root that `start` sees.
        vocabulary: tokens that are drafted; None for all. May be set before `bind`.
        accuracy: by head and rank, [K][ranks]: share of held-out places where that token was right, on the right path;
            None where it was not measured. Trees are searched by it; it is saved with the heads.
    """

    kind: ClassVar[str]
    is_sequential: ClassVar[bool]
    context: int = 0

    def __init__(
        self, num_heads: int, hidden_size: int, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        check_whole("num_heads", num_heads)
        check_whole("hidden_size", hidden_size)
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.vocabulary = vocabulary
        self.accuracy: list[list[float]] | None = None
        self._base: BaseWeights | None = None
        self._rows: torch.Tensor | None = None  # [V', C]
        self._bias: torch.Tensor | None = None  # [V']

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns the plain values that `create_heads(kind, **settings)` makes the same shape from."""

    @abstractmethod
    def start(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Begins paths.

        Args:
            hidden: [R, C] after the final norm, of the token before the root.
            context: [R, W, C] embeddings of the W tokens before the root, oldest first; zeros where the text is shorter.

        Returns:
            What a path carries, [R, S].
        """

    @abstractmethod
    def step(self, carried: torch.Tensor, embedding: torch.Tensor, k: int) -> torch.Tensor:
        """Returns what paths carry after their k-th token (0: the root), [R, S'].

        Args:
            carried: [R, S] of the paths so far.
            embedding: [R, C] of that token.
            k: its place in the path.
        """

    @abstractmethod
    def read(self, carried: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the states of head k, [R, C], from what paths carry after step k."""

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns the states of all heads along given paths, [R, K, C].

        Args:
            hidden: [R, C], as in `start`.
            embeddings: [R, W + K, C] of W context tokens, the root, and the K - 1 tokens after it.
        """
        embeddings = embeddings.to(self.dtype)
        carried = self.start(hidden, embeddings[:, : self.context])
        states = []
        for k in range(self.num_heads):
            carried = self.step(carried, embeddings[:, self.context + k], k)
            states.append(self.read(carried, k))
        return torch.stack(states, 1)

    @property
    def shares_lm_head(self) -> bool:
        """Whether all heads use the base's LM head, so that `logits` is the same for each."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        """What the heads compute in."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the heads are."""
        return next(self.parameters()).device

    @property
    def is_bound(self) -> bool:
        """Whether the base's weights were handed in."""
        return self._base is not None

    def bind(
        self,
        embed_weight: torch.Tensor,
        lm_head_weight: torch.Tensor,
        lm_head_bias: torch.Tensor | None = None,
    ) -> None:
        """Takes the base's weights by reference; copies the draft vocabulary's rows of the LM head.

        Args:
            embed_weight: [V, C].
            lm_head_weight: [V, C].
            lm_head_bias: [V] or None.
        """
        base = BaseWeights(
            embed_weight.detach(),
            lm_head_weight.detach(),
            None if lm_head_bias is None else lm_head_bias.detach(),
        )
        base.check(self.hidden_size)
        rows, bias = base.lm_head_weight, base.lm_head_bias
        if self.vocabulary is not None:
            if self.vocabulary.vocab_size > len(rows):
                raise ConfigError(
                    f"draft heads: got a draft vocabulary of a target with {self.vocabulary.vocab_size} tokens, and an "
                    f"LM head with {len(rows)}. Allowed: heads made for this model. Use such heads."
                )
            ids = self.vocabulary.token_ids.to(rows.device)
            rows = rows.index_select(0, ids)
            bias = None if bias is None else bias.index_select(0, ids)
        self._base, self._rows, self._bias = base, rows, bias

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the base's embeddings of target ids, [..., C], in the heads' dtype."""
        return F.embedding(tokens, self._bound().embed_weight).to(self.dtype)

    def logits(self, states: torch.Tensor, k: int) -> torch.Tensor:  # noqa: ARG002  own heads read k
        """Returns head k's logits over the draft vocabulary, [..., V'], from states [..., C].

        In the base's dtype, which is also the dtype that the states are rounded to: that is how they are served.
        """
        rows, bias = self.lm_head_rows()
        return few_rows_linear(states.to(rows.dtype), rows, bias)

    def lm_head_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the base's LM head over the draft vocabulary, [V', C], and its bias [V'] or None."""
        self._bound()
        assert self._rows is not None, "bound heads have rows"
        return self._rows, self._bias

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target ids of draft ids, same shape."""
        return draft_ids if self.vocabulary is None else self.vocabulary.to_target(draft_ids)

    def _bound(self) -> BaseWeights:
        if self._base is None:
            raise ConfigError(
                "draft heads: got a call before `bind`. Allowed: heads that know the base's weights. Call "
                "heads.bind(embed_weight, lm_head_weight) first."
            )
        return self._base


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises `ConfigError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"draft heads: got {name} {value!r}. Allowed: a whole number, {least} or more. Give one."
        )

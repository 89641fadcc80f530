"""Turns positions of answers into what heads read and what they should say. R rows, K heads, V' draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from oval_spec.heads.base import DraftHeads
from oval_spec.heads.facts import BaseWeights
from oval_spec.heads.vocabulary import IGNORED
from oval_spec.training.examples import MISSING, HeadExamples
from oval_spec.training.loss import SoftTargets, Tick, draft_loss, soft_targets


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The base's LM head over the draft vocabulary.

    Attributes:
        weight: [V', C].
        bias: [V'] or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, heads: DraftHeads, base: BaseWeights, dtype: torch.dtype) -> DraftHead:
        """Returns the rows that these heads draft from, in what matrices are multiplied in."""
        weight, bias = base.lm_head_weight, base.lm_head_bias
        if heads.vocabulary is not None:
            ids = heads.vocabulary.token_ids.to(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype))


class Batches:
    """Examples seen through heads: draft ids in place of tokens, embeddings by look-up."""

    def __init__(
        self,
        heads: DraftHeads,
        examples: HeadExamples,
        head: DraftHead,
        *,
        soft_tokens: int,
        tick: Tick,
    ) -> None:
        """Looks every token up in the draft vocabulary, and computes soft targets where they are asked for.

        Args:
            heads: bound.
            examples: on the heads' device.
            head: what all heads' states are multiplied with.
            soft_tokens: S of `SoftTargets`; 0 for none.
            tick: told how far soft targets are.
        """
        self.heads, self.examples = heads, examples
        self._head = head
        vocabulary, tokens = heads.vocabulary, examples.tokens
        self._draft = (
            tokens if vocabulary is None else vocabulary.to_draft(tokens).to(tokens.device)
        )
        self._soft: SoftTargets | None = None
        if soft_tokens:
            self._soft = soft_targets(examples.hidden, head.weight, head.bias, soft_tokens, tick)

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns all heads' states on the path that the answer took, [R, K, C]."""
        heads = self.heads
        paths = self.examples.paths(rows, heads.context, heads.num_heads)
        embeddings = heads.embed(paths.clamp(min=0)) * (paths != MISSING)[..., None]
        hidden = self.examples.hidden[rows].to(heads.dtype)
        dtype = self._head.weight.dtype
        with torch.autocast(rows.device.type, dtype=dtype, enabled=dtype != torch.float32):
            states: torch.Tensor = heads(hidden, embeddings)
        return states

    def targets(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the draft id that each head should say, [R, K]; `IGNORED` past the end and outside the vocabulary."""
        places = self.examples.places(rows, self.heads.num_heads)
        return self._draft[places.clamp(min=0)].where(places != MISSING, IGNORED)

    def counted(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns where a head has a token to predict, inside the vocabulary or not, bool [R, K]."""
        return self.examples.places(rows, self.heads.num_heads) != MISSING

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [..., V'] from states [..., C]."""
        return F.linear(states.to(self._head.weight.dtype), self._head.weight, self._head.bias)

    def loss(self, rows: torch.Tensor, decay: float, regression: float) -> torch.Tensor:
        """Returns sum_k decay^k CE_k, averaged over the rows, with `regression` times the distance of states, float32."""
        states, targets = self.states(rows), self.targets(rows)
        heads = torch.arange(states.shape[1], device=rows.device)
        scale = (decay**heads / len(rows)).expand(len(rows), -1)
        places = self.examples.places(rows, len(heads))
        known = targets != IGNORED
        soft = None if self._soft is None else self._soft.at(places[known])
        loss = draft_loss(
            states[known], self._head.weight, self._head.bias, targets[known], scale[known], soft
        )
        if regression:
            there = places != MISSING
            wanted = self.examples.hidden[places[there]].float()
            far = F.smooth_l1_loss(states[there].float(), wanted, reduction="none").mean(1)
            loss = loss + regression * (far * scale[there]).sum()
        return loss

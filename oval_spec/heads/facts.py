"""What draft heads must know of the model they draft for: its shape, and its own embeddings and LM head. V rows, C hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oval_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFacts:
    """Shape of a base model, by which heads are refused that belong to another one.

    Attributes:
        model_type: family of the decoder, as its config says it; "" where it is not known.
        hidden_size: its hidden size, C.
        vocab_size: rows of its LM head, V.
    """

    model_type: str
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class BaseWeights:
    """Weights of the base that heads read and never own, save or train.

    Attributes:
        embed_weight: input embeddings [V, C].
        lm_head_weight: LM head [V, C].
        lm_head_bias: its bias [V]; None if it has none.
    """

    embed_weight: torch.Tensor
    lm_head_weight: torch.Tensor
    lm_head_bias: torch.Tensor | None = None

    def check(self, hidden_size: int) -> None:
        """Raises `ConfigError` unless these weights are [V, hidden_size]."""
        for name in ("embed_weight", "lm_head_weight"):
            weight: torch.Tensor = getattr(self, name)
            if weight.dim() != 2 or weight.shape[1] != hidden_size:
                raise ConfigError(
                    f"draft heads: got {name} {list(weight.shape)} of the base model. Allowed: [V, {hidden_size}], as "
                    "the heads were made for. Use heads that belong to this model."
                )
        bias = self.lm_head_bias
        if bias is not None and bias.shape != self.lm_head_weight.shape[:1]:
            raise ConfigError(
                f"draft heads: got lm_head_bias {list(bias.shape)}. Allowed: [{len(self.lm_head_weight)}], one a token. "
                "Pass the bias of the LM head."
            )

"""The small LLaVA as it is trained: decoder with additions, projector, image features in place of image tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from oval_adapters.models.llava_weights import LlavaWeights
from oval_adapters.models.lora import LoraLinear, add_lora, lora_tensors
from oval_adapters.training.llava_rows import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["Student", "make_projector", "trained_tensors"]

SCALE = 2.0
"""Of the additions."""


def make_projector(vision: PreTrainedConfig, text: PreTrainedConfig, seed: int) -> nn.Module:
    """Returns Hugging Face's projector with new weights, float32."""
    # copies: a config that takes another in changes how that one's model computes attention
    config = LlavaConfig(
        vision_config=copy.deepcopy(vision),
        text_config=copy.deepcopy(text),
        vision_feature_layer=-1,
    )
    projector: nn.Module = LlavaMultiModalProjector(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in projector.named_parameters():
            if name.endswith("weight"):
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.zero_()
    return projector


class Student(nn.Module):
    """A decoder that sees standardised features.

    Attributes:
        decoder: the causal model; frozen but for its additions.
        projector: float32.
        added: additions by their names in the decoder; empty in the projector's stage.
        mean: of features, [D].
        std: of features, [D].
    """

    def __init__(
        self, decoder: PreTrainedModel, projector: nn.Module, rank: int, seed: int
    ) -> None:
        super().__init__()
        self.decoder, self.projector = decoder, projector
        decoder.requires_grad_(False)
        self.added: dict[str, LoraLinear] = {}
        if rank:
            self.added = add_lora(decoder.model, rank, SCALE, seed)
        size = projector.linear_1.in_features
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def standardise(self, features: torch.Tensor) -> torch.Tensor:
        """Returns features of mean 0 and deviation 1, float32 as given [..., D]."""
        return (features.float() - self.mean) / self.std

    def learn_statistics(self, features: torch.Tensor) -> None:
        """Takes mean and deviation from features [..., D]."""
        flat = features.flatten(0, -2).float()
        self.mean.copy_(flat.mean(0))
        self.std.copy_(flat.std(0).clamp_min(1e-3))

    def logits(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        """Returns what follows each place that predicts an answer, float32 [A, V].

        Args:
            batch: rows.
            features: of their pictures, in order, [pictures, N, D].
        """
        inner = self.decoder.model
        embeds = inner.embed_tokens(batch.tokens)
        seen = self.projector(self.standardise(features)).to(embeds.dtype)
        embeds = embeds.masked_scatter(batch.is_image[..., None], seen)
        hidden_from = torch.zeros_like(batch.mask, dtype=embeds.dtype)
        hidden_from.masked_fill_(~batch.mask, torch.finfo(embeds.dtype).min)
        hidden = inner(
            inputs_embeds=embeds,
            attention_mask=hidden_from,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        logits: torch.Tensor = self.decoder.lm_head(hidden[batch.rows, batch.places])
        return logits.float()

    def loss(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        """Returns the weighted cross-entropy of the answers."""
        each = F.cross_entropy(self.logits(batch, features), batch.targets, reduction="none")
        return (each * batch.weights).sum() / batch.weights.sum()

    @torch.no_grad()
    def hits(self, batch: Batch, features: torch.Tensor) -> list[bool]:
        """Returns for each answer whether greedy decoding gives exactly it, its end included."""
        right = self.logits(batch, features).argmax(1) == batch.targets
        found = torch.ones(int(batch.answers.max()) + 1, dtype=torch.bool)
        found[batch.answers[~right]] = False
        return found.tolist()

    def groups(self, projector_rate: float, lora_rate: float) -> list[dict[str, Any]]:
        """Returns what is trained, with its learning rates."""
        own = [p for module in self.added.values() for p in (module.a, module.b)]
        groups = [{"params": list(self.projector.parameters()), "peak": projector_rate}]
        return groups + ([{"params": own, "peak": lora_rate}] if own else [])

    def weights(self, side: int, base: Mapping[str, Any], training: Mapping[str, Any]) -> LlavaWeights:  # fmt: skip
        """Returns what was trained; the statistics become part of the projector's first layer."""
        state = {name: tensor.detach().clone() for name, tensor in self.projector.state_dict().items()}  # fmt: skip
        state["linear_1.weight"] = state["linear_1.weight"] / self.std
        state["linear_1.bias"] = state["linear_1.bias"] - state["linear_1.weight"] @ self.mean
        lora = {f"model.{name}": tensor for name, tensor in lora_tensors(self.added).items()}
        return LlavaWeights(
            projector=state, lora=lora, scale=SCALE, mean=self.mean, std=self.std, side=side, base=base, training=training
        )  # fmt: skip

    @torch.no_grad()
    def load(self, weights: LlavaWeights) -> None:
        """Takes trained weights; the statistics come out of the first layer again. Additions that are not there stay new."""
        self.mean.copy_(weights.mean)
        self.std.copy_(weights.std)
        state = {name: tensor.float() for name, tensor in weights.projector.items()}
        state["linear_1.bias"] = state["linear_1.bias"] + state["linear_1.weight"] @ self.mean
        state["linear_1.weight"] = state["linear_1.weight"] * self.std
        self.projector.load_state_dict(state)
        for name, module in self.added.items():
            if f"model.{name}.a" in weights.lora:
                module.a.copy_(weights.lora[f"model.{name}.a"].float())
                module.b.copy_(weights.lora[f"model.{name}.b"].float())


def trained_tensors(student: Student) -> Sequence[tuple[str, torch.Tensor]]:
    """Returns everything that training changes, by name."""
    found = [(f"projector.{name}", p) for name, p in student.projector.named_parameters()]
    for name, module in student.added.items():
        found += [(f"{name}.a", module.a), (f"{name}.b", module.b)]
    return [*found, ("mean", student.mean), ("std", student.std)]

"""Slow oracles of CLIP page embeddings and page choice: patch by patch, token by token, and tiny random CLIPs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel

WORDS = 64
PLACES = 12
"""Tokens that the tiny text towers take."""


class LetterTokenizer:
    """A token a letter; start 0, end `WORDS - 1`, padding by the end token, as CLIP's tokenizers do it."""

    def ids(self, text: str) -> list[int]:
        return [0, *(1 + ord(letter) % (WORDS - 2) for letter in text)]

    def __call__(self, texts: Sequence[str], max_length: int = PLACES, **_: Any) -> dict[str, torch.Tensor]:  # fmt: skip
        rows = [[*self.ids(text)[: max_length - 1], WORDS - 1] for text in texts]
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [WORDS - 1] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(96 + i) for i in ids if not (skip_special_tokens and i == 0))


class PaddedLetters(LetterTokenizer):
    """The same as open_clip's tokenizers give it: all rows of full width, zeros behind the end."""

    def __call__(self, texts: Sequence[str], **_: Any) -> torch.Tensor:  # type: ignore[override]
        rows = [[*self.ids(text)[: PLACES - 1], WORDS - 1] for text in texts]
        return torch.tensor([row + [0] * (PLACES - len(row)) for row in rows])


@functools.cache
def tiny_hf_clip(act: str = "quick_gelu", image_size: int = 24) -> CLIPModel:
    torch.manual_seed(3)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "hidden_act": act}
    config = CLIPConfig(
        projection_dim=20,
        vision_config={**tower, "num_attention_heads": 4, "image_size": image_size, "patch_size": 6},
        text_config={
            **tower, "num_attention_heads": 4, "vocab_size": WORDS, "max_position_embeddings": PLACES,
            "bos_token_id": 0, "eos_token_id": WORDS - 1, "pad_token_id": WORDS - 1,
        },
    )  # fmt: skip
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim and "layer_norm" not in name and "layernorm" not in name:
                weight.normal_(0, 0.3)
            elif weight.ndim:
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def open_clip_weights(model: CLIPModel) -> dict[str, torch.Tensor]:
    """The weights of a HF CLIP under the names of open_clip."""
    out: dict[str, torch.Tensor] = {"logit_scale": model.logit_scale}

    def layers(tower: Any, prefix: str) -> None:
        for number, layer in enumerate(tower.encoder.layers):
            start = f"{prefix}transformer.resblocks.{number}."
            attention = layer.self_attn
            parts = [attention.q_proj, attention.k_proj, attention.v_proj]
            out[f"{start}attn.in_proj_weight"] = torch.cat([part.weight for part in parts])
            out[f"{start}attn.in_proj_bias"] = torch.cat([part.bias for part in parts])
            named = {
                "attn.out_proj": attention.out_proj, "ln_1": layer.layer_norm1, "ln_2": layer.layer_norm2,
                "mlp.c_fc": layer.mlp.fc1, "mlp.c_proj": layer.mlp.fc2,
            }  # fmt: skip
            for name, module in named.items():
                out[f"{start}{name}.weight"], out[f"{start}{name}.bias"] = (
                    module.weight,
                    module.bias,
                )

    vision, text = model.vision_model, model.text_model
    layers(vision, "visual.")
    layers(text, "")
    out["visual.conv1.weight"] = vision.embeddings.patch_embedding.weight
    out["visual.class_embedding"] = vision.embeddings.class_embedding
    out["visual.positional_embedding"] = vision.embeddings.position_embedding.weight
    for name, module in (("ln_pre", vision.pre_layrnorm), ("ln_post", vision.post_layernorm)):
        out[f"visual.{name}.weight"], out[f"visual.{name}.bias"] = module.weight, module.bias
    out["visual.proj"] = model.visual_projection.weight.T
    out["token_embedding.weight"] = text.embeddings.token_embedding.weight
    out["positional_embedding"] = text.embeddings.position_embedding.weight
    out["ln_final.weight"], out["ln_final.bias"] = (
        text.final_layer_norm.weight,
        text.final_layer_norm.bias,
    )
    out["text_projection"] = model.text_projection.weight.T
    return {name: weight.detach().clone() for name, weight in out.items()}


def _norm(values: list[float], weight: torch.Tensor, bias: torch.Tensor, eps: float) -> list[float]:
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / len(values)
    scaled = [(value - mean) / math.sqrt(spread + eps) for value in values]
    pairs = zip(scaled, weight.tolist(), bias.tolist(), strict=True)
    return [s * w + b for s, w, b in pairs]


def _linear(values: list[float], weight: torch.Tensor, bias: torch.Tensor | None) -> list[float]:
    rows = weight.tolist()
    out = [sum(w * v for w, v in zip(row, values, strict=True)) for row in rows]
    return out if bias is None else [o + b for o, b in zip(out, bias.tolist(), strict=True)]


def region_slowly(
    model: CLIPModel, hidden: torch.Tensor, patches: Sequence[int], has_residual: bool, act: str
) -> list[float]:
    """Embedding of a region of an image: each patch to the joint space alone, then mean and length."""
    tower = model.vision_model
    layer, eps = tower.encoder.layers[-1], tower.config.layer_norm_eps
    attention, total = layer.self_attn, [0.0] * model.config.projection_dim
    for patch in patches:
        entering = hidden[patch].tolist()
        states = _norm(entering, layer.layer_norm1.weight, layer.layer_norm1.bias, eps)
        states = _linear(states, attention.v_proj.weight, attention.v_proj.bias)
        states = _linear(states, attention.out_proj.weight, attention.out_proj.bias)
        if has_residual:
            states = [a + b for a, b in zip(entering, states, strict=True)]
            wide = _norm(states, layer.layer_norm2.weight, layer.layer_norm2.bias, eps)
            wide = [_act(v, act) for v in _linear(wide, layer.mlp.fc1.weight, layer.mlp.fc1.bias)]
            more = _linear(wide, layer.mlp.fc2.weight, layer.mlp.fc2.bias)
            states = [a + b for a, b in zip(states, more, strict=True)]
        states = _norm(states, tower.post_layernorm.weight, tower.post_layernorm.bias, eps)
        joint = _linear(states, model.visual_projection.weight, None)
        total = [t + value / len(patches) for t, value in zip(total, joint, strict=True)]
    length = math.sqrt(sum(value * value for value in total))
    return [value / length for value in total]


def _act(value: float, act: str) -> float:
    if act == "quick_gelu":
        return value / (1 + math.exp(-1.702 * value))
    return value * 0.5 * (1 + math.erf(value / math.sqrt(2)))


def overlap_slowly(cells: tuple[int, int], places: Sequence[int], patches: tuple[int, int], steps: int = 60) -> list[float]:  # fmt: skip
    """Share of a page's area in each patch, by points of a fine raster."""
    counts = [0.0] * (patches[0] * patches[1])
    for place in places:
        row, column = divmod(place, cells[1])
        for i in range(steps):
            for j in range(steps):
                y = (row + (i + 0.5) / steps) / cells[0]
                x = (column + (j + 0.5) / steps) / cells[1]
                counts[int(y * patches[0]) * patches[1] + int(x * patches[1])] += 1
    return [count / sum(counts) for count in counts]

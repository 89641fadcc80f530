"""Turns a DINOv2 backbone in an ONNX file into a plain Hugging Face folder with its image processor. Contacts no hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oval_adapters.models.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import Dinov2Config

    from oval_adapters.models.catalog import EmbeddedModel
    from oval_adapters.models.onnx_file import OnnxFile
    from oval_adapters.models.progress import BuildReporter

__all__ = ["IMAGE_SIDE", "convert", "image_settings"]

IMAGE_SIDE = 112
"""Pixels a side that pictures are scaled to: 8 x 8 patches."""

PREFIX = "backbone."
NODE_PREFIX = "/backbone/"
_RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
_HEAD_SIZE = 64


def convert(weights: Path, out: Path, model: EmbeddedModel, reporter: BuildReporter) -> None:
    """Writes the backbone and its image processor to `out`, loadable offline by the Auto classes.

    Raises:
        BuildError: the file's content is not what the catalog says.
    """
    reporter.step("importing torch and transformers")
    import torch
    from transformers import BitImageProcessorPil, Dinov2Model
    from transformers.utils import logging

    from oval_adapters.models.onnx_file import read_onnx

    reporter.step("reading the weights")
    state = _state(read_onnx(weights))
    reporter.step(f"saving the model in {model.dtype}")
    backbone = Dinov2Model(_config(state, model.name)).eval()
    result = backbone.load_state_dict(state, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise BuildError(
            f"the weights of {model.name!r} do not fit Dinov2Model: missing {sorted(result.missing_keys)[:3]}, unexpected "
            f"{sorted(result.unexpected_keys)[:3]}. Install a transformers in the supported range (oval doctor names it) "
            "and build again."
        )
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        backbone.to(getattr(torch, model.dtype)).save_pretrained(out)
    finally:
        if were_on:
            logging.enable_progress_bar()
    BitImageProcessorPil(**image_settings(IMAGE_SIDE)).save_pretrained(out)


def image_settings(side: int) -> dict[str, object]:
    """Returns the settings of the image processor: the whole picture, scaled to a square, as DINOv2 saw its own."""
    size = {"height": side, "width": side}
    return {
        "size": size,
        "crop_size": size,
        "do_center_crop": False,
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


def _state(file: OnnxFile) -> dict[str, torch.Tensor]:
    """Returns the backbone's weights under Hugging Face's names."""
    found = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in file.tensors.items()
        if name.startswith(PREFIX)
    }
    for node in file.nodes:  # weights of linear layers have lost their names, their nodes have not
        if node.kind == "MatMul" and node.name.startswith(NODE_PREFIX) and node.inputs[1] in file.tensors:  # fmt: skip
            layer = node.name.removeprefix(NODE_PREFIX).removesuffix("/MatMul").replace("/", ".")
            found[f"{layer}.weight"] = file.tensors[node.inputs[1]].T.contiguous()
    state = {}
    for name, tensor in found.items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        state[name] = tensor
    size = state["embeddings.cls_token"].shape[-1] if "embeddings.cls_token" in state else 0
    places = [t for name, t in file.tensors.items() if not name.startswith(PREFIX) and t.dim() == 3 and t.shape[0] == 1 and t.shape[-1] == size]  # fmt: skip
    if len(places) != 2:
        raise BuildError(
            f"the file holds {len(places)} position tables, expected 2: the first token's and the patches'. "
            "Build again with --force."
        )
    import torch

    state["embeddings.position_embeddings"] = torch.cat(sorted(places, key=lambda t: t.shape[1]), 1)
    return state


def _config(state: dict[str, torch.Tensor], name: str) -> Dinov2Config:
    from transformers import Dinov2Config

    patches = state.get("embeddings.patch_embeddings.projection.weight")
    if patches is None:
        raise BuildError(f"the file of {name!r} holds no patch embedding. Build again with --force.")  # fmt: skip
    size, patch = patches.shape[0], patches.shape[-1]
    side = round((state["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    layers = {key.split(".")[2] for key in state if key.startswith("encoder.layer.")}
    return Dinov2Config(
        hidden_size=size,
        num_attention_heads=size // _HEAD_SIZE,
        num_hidden_layers=len(layers),
        image_size=side * patch,
        patch_size=patch,
        mlp_ratio=state["encoder.layer.0.mlp.fc1.weight"].shape[0] // size,
        use_mask_token=False,  # only its own pre-training needs it
    )

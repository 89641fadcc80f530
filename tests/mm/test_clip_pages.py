"""Pages of a LLaVA prompt in CLIP's space: the shared tower, the second pass, texts; loading by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_clip import LetterTokenizer, tiny_hf_clip
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from oval_adapters.clip.hf_clip import HfClipEmbedder
from oval_adapters.clip.load import load_clip
from oval_adapters.clip.page_vectors import ImagePageVectors, TextPageVectors, pixels_for
from oval_adapters.clip.shared_tower import why_not_shared
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_mm.clip.embedder import PixelFacts
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

GRID = Grid(4, 4)
PAGES = tile_pages(GRID, 2)


def llava(layer: int = -2, vision: Any = None) -> Any:
    clip = tiny_hf_clip()
    vision = vision or clip.config.vision_config
    text = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=layer
    )
    model = LlavaForConditionalGeneration(config).eval()
    if vision is clip.config.vision_config:
        model.model.vision_tower.load_state_dict(clip.vision_model.state_dict())
    return model


def embedder() -> HfClipEmbedder:
    return HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())


def images(count: int = 1, size: int = 24) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(6))


def test_an_equal_tower_serves_both() -> None:
    model, clip, pixels = llava(), embedder(), images()
    vectors = ImagePageVectors(model, clip)
    assert (vectors.shared, vectors.why_not) == (True, None)
    tower = model.model.vision_tower
    hidden = tower(pixels, output_hidden_states=True).hidden_states[-2][0, 1:]
    clip.hidden_of = None  # a second pass would fail
    got = vectors.of_image(GRID, PAGES, hidden, None)
    want = embedder().embed_regions(embedder().hidden_of(pixels), GRID, PAGES)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_half_precision_of_the_same_weights_is_still_the_same_tower() -> None:
    assert why_not_shared(llava().half(), embedder()) is None


@pytest.mark.parametrize("weight", ["embeddings.class_embedding", "encoder.layers.1.mlp.fc1.bias"])
def test_one_changed_weight_ends_sharing(weight: str) -> None:
    model = llava()
    with torch.no_grad():
        model.model.vision_tower.get_parameter(weight).view(-1)[0] += 1
    assert why_not_shared(model, embedder()) == f"weights differ: {weight}"


def test_the_last_layer_of_llavas_tower_does_not_matter() -> None:
    model = llava()
    with torch.no_grad():
        model.model.vision_tower.encoder.layers[-1].mlp.fc1.bias += 1
        model.model.vision_tower.post_layernorm.bias += 1
    assert why_not_shared(model, embedder()) is None


def test_other_towers_are_told_apart() -> None:
    assert "reads layer -1" in str(why_not_shared(llava(layer=-1), embedder()))
    assert (
        why_not_shared(llava(layer=2), embedder()) is None
    )  # the same layer, counted from the first
    plain = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )  # fmt: skip
    assert "siglip" in str(why_not_shared(llava(vision=plain), embedder()))
    wider = type(tiny_hf_clip().config.vision_config)(
        **{**tiny_hf_clip().config.vision_config.to_dict(), "image_size": 36}
    )
    reason = why_not_shared(llava(vision=wider), embedder())
    assert reason is not None
    assert "[37, 32]" in reason


def test_another_tower_costs_a_pass_of_the_clip_and_maps_grids() -> None:
    model, clip, pixels = llava(layer=-1), embedder(), images(size=36)
    vectors = ImagePageVectors(model, clip)
    assert not vectors.shared
    grid = Grid(6, 6)
    pages = tile_pages(grid, 3)  # 2 x 2 pages, as PAGES are over the CLIP's 4 x 4 patches
    got = vectors.of_image(grid, pages, torch.zeros(36, 99), pixels[0])
    facts = clip.pixels
    source = PixelFacts(size=(36, 36), mean=facts.mean, std=facts.std)
    own = clip.hidden_of(pixels_for(pixels, source, facts))
    torch.testing.assert_close(got, clip.embed_regions(own, GRID, PAGES)[0], atol=1e-5, rtol=1e-5)


def test_pixels_are_renormalised() -> None:
    plain = torch.rand(1, 3, 8, 8)
    first = PixelFacts(size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    second = PixelFacts(size=(8, 8), mean=(0.5, 0.5, 0.5), std=(1.0, 2.0, 4.0))

    def normal(facts: PixelFacts) -> torch.Tensor:
        mean, std = (torch.tensor(part)[:, None, None] for part in (facts.mean, facts.std))
        return (plain - mean) / std

    torch.testing.assert_close(pixels_for(normal(first), first, second), normal(second))
    torch.testing.assert_close(pixels_for(normal(first), first, first), normal(first))
    flat = torch.full((1, 3, 8, 8), 0.25)
    grown = pixels_for((flat - 0.1) / 0.5, PixelFacts(size=(8, 8), mean=(0.1,) * 3, std=(0.5,) * 3),
                       PixelFacts(size=(5, 6), mean=(0.0,) * 3, std=(1.0,) * 3))  # fmt: skip
    torch.testing.assert_close(grown, torch.full((1, 3, 5, 6), 0.25))


def test_text_pages_are_embedded_once() -> None:
    clip = embedder()
    asked: list[list[str]] = []

    class Counting:
        def embed_text(self, texts: Any) -> torch.Tensor:
            asked.append(list(texts))
            return clip.embed_text(texts)

    vectors = TextPageVectors(Counting(), LetterTokenizer())  # type: ignore[arg-type]
    ids = [0, 1, 2, 3, 1, 2, 4]
    got = vectors.of_pages(ids, [[0, 1, 2], [4, 5], [3, 6]])
    assert asked == [["ab", "cd"]]  # without the special token, and each text once
    torch.testing.assert_close(got, clip.embed_text(["ab", "ab", "cd"]))
    again = vectors.of_pages(ids, [[3, 6]])
    assert len(asked) == 1
    torch.testing.assert_close(again, got[2:])


def test_load_by_folder_and_refuse_by_kind(tmp_path: Path) -> None:
    from transformers import SiglipConfig

    SiglipConfig().save_pretrained(tmp_path / "siglip")
    with pytest.raises(UnsupportedModelError, match="attention head"):
        load_clip(str(tmp_path / "siglip"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_clip(str(tmp_path / "nothing"))


def test_load_from_a_folder(tmp_path: Path) -> None:
    from tiny_llava import save_llava
    from transformers import AutoProcessor, AutoTokenizer

    save_llava(tmp_path / "llava")
    tiny_hf_clip().save_pretrained(tmp_path / "clip")
    AutoTokenizer.from_pretrained(tmp_path / "llava").save_pretrained(tmp_path / "clip")
    processor = AutoProcessor.from_pretrained(tmp_path / "llava")
    processor.image_processor.image_mean = [0.25, 0.5, 0.75]
    processor.image_processor.save_pretrained(tmp_path / "clip")
    loaded = load_clip(str(tmp_path / "clip"))
    assert (loaded.dim, loaded.patch_grid, loaded.pixels.size) == (20, (4, 4), (24, 24))
    assert loaded.pixels.mean == (0.25, 0.5, 0.75)
    torch.testing.assert_close(loaded.embed_images(images()), embedder().embed_images(images()))


def test_open_clip_by_name() -> None:
    pytest.importorskip("open_clip")
    loaded = load_clip("open_clip:ViT-S-32-alt")
    assert (loaded.dim, loaded.patch_grid) == (256, (7, 7))
    assert loaded.embed_text(["a cat"]).shape == (1, 256)
    with pytest.raises(ConfigError, match="cannot make"):
        load_clip("open_clip:NoSuchModel")
    with pytest.raises(UnsupportedModelError, match="ModifiedResNet"):
        load_clip("open_clip:RN50-quickgelu")

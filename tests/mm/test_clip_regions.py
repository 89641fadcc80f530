"""Region features against slow oracles; CLIPs of two libraries with the same weights agree; others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_clip import (
    LetterTokenizer,
    PaddedLetters,
    open_clip_weights,
    overlap_slowly,
    region_slowly,
    tiny_hf_clip,
)

from oval_adapters.clip.hf_clip import HfClipEmbedder
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_mm.clip.open_clip_model import OpenClipEmbedder
from oval_mm.clip.regions import page_weights
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

GRID = Grid(4, 4, False)
PAGES = tile_pages(GRID, 2)


def pixels(count: int = 2, size: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def open_clip_twin(act: str = "quick_gelu", **vision: Any) -> Any:
    library = pytest.importorskip("open_clip.model")
    tower = {"layers": 3, "width": 32}
    model = library.CLIP(
        embed_dim=20,
        quick_gelu=act == "quick_gelu",
        vision_cfg={
            **tower, "image_size": 24, "patch_size": 6, "head_width": 8, "mlp_ratio": 2.0, **vision,
        },
        text_cfg={**tower, "context_length": 12, "vocab_size": 64, "heads": 4, "mlp_ratio": 2.0},
    )  # fmt: skip
    if not vision:
        model.load_state_dict(open_clip_weights(tiny_hf_clip(act)))
    return model


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_regions_equal_the_slow_value_path(act: str, has_residual: bool) -> None:
    model = tiny_hf_clip(act)
    embedder = HfClipEmbedder(model, LetterTokenizer(), has_residual=has_residual)
    hidden = embedder.hidden_of(pixels())
    got = embedder.embed_regions(hidden, GRID, PAGES)
    assert got.shape == (2, 4, 20)
    for image in range(2):
        want = region_slowly(model, hidden[image], PAGES[1], has_residual, act)
        torch.testing.assert_close(got[image, 1], torch.tensor(want), atol=1e-4, rtol=1e-4)


def test_hidden_states_are_what_enters_the_last_layer() -> None:
    model, found = tiny_hf_clip(), []
    last = model.vision_model.encoder.layers[-1]
    hook = last.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    hidden = HfClipEmbedder(model, LetterTokenizer()).hidden_of(pixels())
    hook.remove()
    torch.testing.assert_close(hidden, found[0][:, 1:], atol=0, rtol=0)


def test_a_class_token_is_left_out() -> None:
    embedder = HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())
    hidden = embedder.hidden_of(pixels())
    with_class = torch.cat([torch.full_like(hidden[:, :1], 9.0), hidden], 1)
    got = embedder.embed_regions(with_class, GRID, PAGES)
    torch.testing.assert_close(got, embedder.embed_regions(hidden, GRID, PAGES))
    with pytest.raises(ConfigError, match="tokens for 4 x 4 patches"):
        embedder.embed_regions(hidden[:, :-1], GRID, PAGES)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_both_libraries_agree(act: str) -> None:
    ours = HfClipEmbedder(tiny_hf_clip(act), LetterTokenizer())
    theirs = OpenClipEmbedder(open_clip_twin(act), PaddedLetters())
    assert (theirs.dim, theirs.patch_grid) == (ours.dim, ours.patch_grid)
    texts = ["cat", "a very long text that outgrows the places", ""]
    torch.testing.assert_close(theirs.embed_text(texts), ours.embed_text(texts), atol=1e-4, rtol=1e-3)  # fmt: skip
    images = pixels()
    torch.testing.assert_close(theirs.embed_images(images), ours.embed_images(images), atol=1e-4, rtol=1e-3)  # fmt: skip
    hidden = ours.hidden_of(images)
    torch.testing.assert_close(theirs.hidden_of(images), hidden, atol=1e-3, rtol=1e-3)
    got, want = (e.embed_regions(hidden, GRID, PAGES) for e in (theirs, ours))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_hidden_of_open_clip_without_batch_first() -> None:
    first = open_clip_twin()
    want = OpenClipEmbedder(first, PaddedLetters()).hidden_of(pixels())
    transformer = first.visual.transformer
    transformer.batch_first = False
    for layer in transformer.resblocks:
        layer.attn.batch_first = False
    got = OpenClipEmbedder(first, PaddedLetters()).hidden_of(pixels())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_embeddings_have_length_one_and_depend_on_their_input() -> None:
    embedder = HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())
    made = [embedder.embed_text(["ab", "zz"]), embedder.embed_images(pixels())]
    made.append(embedder.embed_regions(embedder.hidden_of(pixels()), GRID, PAGES)[0])
    for vectors in made:
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(vectors)))
        assert not torch.allclose(vectors[0], vectors[1], atol=1e-3)


def test_a_long_text_is_cut_not_refused() -> None:
    embedder = HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())
    long = embedder.embed_text(["abcdefghijklmnopq", "abcdefghijXYZ"])
    torch.testing.assert_close(long[0], long[1])


@pytest.mark.parametrize("patches", [(4, 4), (6, 3), (2, 2), (7, 5)])
def test_page_weights_are_shares_of_area(patches: tuple[int, int]) -> None:
    got = page_weights(GRID, PAGES, patches)
    for page, places in enumerate(PAGES):
        # a raster of 60 points a cell: exact where patch edges fall between points
        want = torch.tensor(overlap_slowly((4, 4), places, patches))
        torch.testing.assert_close(got[page], want, atol=0.02, rtol=0)
    torch.testing.assert_close(got.sum(1), torch.ones(len(PAGES)))


def test_equal_grids_give_the_mean_of_a_page() -> None:
    got = page_weights(GRID, PAGES, (4, 4))
    want = torch.zeros_like(got)
    for page, places in enumerate(PAGES):
        want[page, places] = 1 / len(places)
    torch.testing.assert_close(got, want)


def test_newline_places_cover_nothing() -> None:
    lined = Grid(4, 4, True)
    pages = tile_pages(lined, 2)
    assert sorted(p for page in pages for p in page) == list(range(20))
    torch.testing.assert_close(page_weights(lined, pages, (4, 4)), page_weights(GRID, PAGES, (4, 4)))  # fmt: skip
    with pytest.raises(ConfigError, match="without a patch"):
        page_weights(lined, [[4]], (4, 4))


def test_towers_without_a_value_path_are_refused_by_name() -> None:
    class ModifiedResNet:
        pass

    class TimmModel:
        pass

    for tower in (ModifiedResNet(), TimmModel()):
        model = type("Model", (), {"visual": tower})()
        with pytest.raises(UnsupportedModelError, match=type(tower).__name__):
            OpenClipEmbedder(model, PaddedLetters())
    pooled = open_clip_twin(attentional_pool=True, attn_pooler_queries=2, attn_pooler_heads=4)
    with pytest.raises(UnsupportedModelError, match="pools by attention"):
        OpenClipEmbedder(pooled, PaddedLetters())
    custom = open_clip_twin(block_type="custom")
    with pytest.raises(UnsupportedModelError, match="CustomResidualAttentionBlock"):
        OpenClipEmbedder(custom, PaddedLetters())


def test_siglip_is_refused_with_the_reason() -> None:
    from transformers import SiglipConfig, SiglipModel

    tower = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = SiglipConfig(
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        text_config={**tower, "vocab_size": 8},
    )
    with pytest.raises(UnsupportedModelError, match="attention head"):
        HfClipEmbedder(SiglipModel(config), LetterTokenizer())

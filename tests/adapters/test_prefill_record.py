"""Rows to train the fusion router on: masses of plain attention, and a router trained on them that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_clip import LetterTokenizer, tiny_hf_clip
from tiny_models import IMAGE_TOKEN, one_thread, run
from tiny_towers import TOKENS, build_tower, images, rows_of, tower_model

from oval_adapters import attach
from oval_adapters.clip.hf_clip import HfClipEmbedder
from oval_adapters.vision.prefill_record import record_prefill
from oval_adapters.vision.prefill_settings import prompt_vectors
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_mm.budget import ImageBudget, choose_pages
from oval_mm.fusion_checkpoint import TrainedFusion, save_fusion
from oval_mm.fusion_router import FusionConfig, FusionRouter
from oval_mm.fusion_training import FusionTraining, train_fusion
from oval_mm.page_choice import ClipScorer
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

_one_thread = pytest.fixture(autouse=True)(one_thread)

N = TOKENS["clip"]
PAGES = tile_pages(Grid(5, 5), 2)
PLAIN = {"page_size": 4, "vision": {"tile": 2}}


def told(layouts: list[list[int]], seed: int = 1) -> dict[str, torch.Tensor]:
    count = sum(len(own) - 1 for own in layouts)
    return {**rows_of(layouts, N, seed), "pixel_values": images(count, seed=seed)}


@pytest.mark.parametrize("layers", [None, (1,)])
def test_masses_are_those_of_plain_attention(layers: tuple[int, ...] | None) -> None:
    inputs = told([[3, 4, 6], [9], [2, 5]])
    with attach(tower_model("clip"), PLAIN) as oval:
        got = record_prefill(oval, inputs, num_queries=4, layers=layers)
    model = build_tower("clip")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    chosen = range(3) if layers is None else layers
    share = torch.stack([maps[layer][:, :, -4:] for layer in chosen]).mean((0, 2, 3))  # [B, T]
    assert len(got) == 2  # the row of text has no page to choose
    ids = inputs["input_ids"]
    for (record, sample), row, count in zip(got, (0, 2), (2, 1), strict=True):
        assert sample is None
        image = share[row][ids[row] == IMAGE_TOKEN].view(count, N)
        want = [sum(own[place] for place in page) for own in image for page in PAGES]
        pages = record.view.num_text_pages
        torch.testing.assert_close(record.mass[pages:], torch.stack(want), atol=1e-5, rtol=1e-4)
        text = share[row, -(6 if row == 0 else 5) :].sum()
        torch.testing.assert_close(record.mass[:pages].sum(), text, atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            words = tower_model("clip").get_input_embeddings()(ids[row, -(6 if row == 0 else 5) :])
        torch.testing.assert_close(record.view.text, words)


def test_recording_needs_a_decoder_that_reads_everything() -> None:
    for config in ({"vision": {"budget": 0.5}}, {"tiers": {"fast_tokens": 128}, "page_size": 4}):
        with (
            attach(tower_model("clip"), config) as oval,
            pytest.raises(ConfigError, match="routed"),
        ):
            record_prefill(oval, told([[3, 4]]))


def test_a_router_trained_on_records_serves(tmp_path: Path) -> None:
    model = tower_model("clip")
    with attach(model, PLAIN) as oval:
        pairs = [record_prefill(oval, told([[3, 5]], seed))[0] for seed in range(12)]
    torch.manual_seed(0)
    router = FusionRouter(FusionConfig(hidden_size=48, size=32))
    settings = FusionTraining(out=str(tmp_path), updates=30, batch=4, save_every=30)
    result = train_fusion([record for record, _ in pairs], router, settings, lambda *_: None)
    assert result.curve[-1]["loss"] < result.curve[0]["held_out_loss"]
    save_fusion(tmp_path / "router", TrainedFusion(router=result.router))
    config = {"vision": {"tile": 2, "budget": 0.4, "router": str(tmp_path / "router")}}
    inputs = told([[3, 5]], seed=40)
    with attach(model, config) as oval:
        cache = run(model, **inputs).cache
        assert oval.stats()["vision"]["image_router"] == "fusion"
        unread = cache.unread_columns(0, 3, N)
    with attach(model, PLAIN) as oval:
        view = record_prefill(oval, inputs)[0][0].view
    with torch.no_grad():
        scores = result.router.density(view)[view.num_text_pages :]
    kept = choose_pages(scores, [len(p) for p in PAGES], [0] * 9, ImageBudget(share=0.4))
    assert [not bool(unread[page[0]]) for page in PAGES] == kept.tolist()
    save_fusion(tmp_path / "wide", TrainedFusion(router=FusionRouter(FusionConfig(hidden_size=50))))
    config["vision"]["router"] = str(tmp_path / "wide")
    with pytest.raises(ConfigError, match="hidden size 50"):
        attach(model, config)


def clip_llava(layer: int) -> Any:
    """A LLaVA around the tower of the tiny CLIP: 4 x 4 patches."""
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(1)
    clip = tiny_hf_clip()
    text = LlamaConfig(
        vocab_size=160, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=640, pad_token_id=0, initializer_range=0.25,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=clip.config.vision_config, text_config=text, image_token_index=IMAGE_TOKEN,
        vision_feature_layer=layer, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    model.model.vision_tower.load_state_dict(clip.vision_model.state_dict())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Decoder:
    """Words of ids, as `LetterTokenizer` reads them."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize(("layer", "shared"), [(-2, True), (-1, False)])
def test_clip_pages_are_those_nearest_to_the_question(layer: int, shared: bool) -> None:
    model, clip = clip_llava(layer), HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())
    inputs = {**rows_of([[3, 2, 5], [4, 6]], 16), "pixel_values": images(3, side=24)}
    vectors = prompt_vectors(model, clip, Decoder())
    assert vectors.shared is shared
    passes = []
    hook = clip.tower.register_forward_hook(lambda *_: passes.append(1))
    with attach(model, {"vision": {"tile": 2, "budget": 0.5, "router": "random", "pages_per_image": 0}}) as oval:  # fmt: skip
        oval.image_routing.use(ClipScorer(), vectors)
        cache = run(model, **inputs, max_new_tokens=2).cache
        run(model, **inputs, max_new_tokens=2)  # the images are known: no pass of any tower
        assert oval.stats()["vision"]["images_encoded"] == 3
        ids, pixels, grid = inputs["input_ids"], inputs["pixel_values"], Grid(4, 4)
        assert len(passes) == (0 if shared else 3)
        hook.remove()
        for row, numbers, count in ((0, (0, 1), 5), (1, (2,), 6)):
            question = clip.embed_text([Decoder().decode(ids[row, -count:].tolist(), True)])[0]
            scores = torch.cat([clip.embed_regions(clip.hidden_of(pixels[i : i + 1]), grid, tile_pages(grid, 2))[0] @ question for i in numbers])  # fmt: skip
            kept = set(scores.topk(len(scores) // 2).indices.tolist())
            held = []
            for number, view in enumerate(cache.image_views.row(row)):
                unread = cache.unread_columns(row, view.column, 16)
                held += [4 * number + page for page, places in enumerate(tile_pages(grid, 2)) if not bool(unread[places[0]])]  # fmt: skip
            assert set(held) == kept


def test_clip_of_the_settings(tmp_path: Path) -> None:
    from tiny_llava import save_llava
    from transformers import AutoProcessor, CLIPConfig, CLIPModel, LlavaForConditionalGeneration

    folder, other = save_llava(tmp_path / "llava"), tmp_path / "clip"
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
    config = CLIPConfig(
        projection_dim=8,
        vision_config={**tower, "image_size": 24, "patch_size": 6},
        text_config={**tower, "vocab_size": 300, "max_position_embeddings": 12, "eos_token_id": 3},
    )
    CLIPModel(config).save_pretrained(other)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.save_pretrained(other)
    processor.image_processor.save_pretrained(other)
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    inputs = {**rows_of([[3, 5]], 4), "pixel_values": images(1, side=16)}
    vision = {"tile": 1, "budget": 0.5, "clip": str(other)}
    with attach(model, {"vision": vision}) as oval:
        cache = run(model, **inputs, max_new_tokens=2).cache
        stats = oval.stats()["vision"]
        assert (stats["image_router"], stats["image_tokens_read"]) == ("clip", 2)
        assert stats["router_seconds"] > 0
        assert int(cache.unread_columns(0, 3, 4).sum()) == 2
        words = model.get_input_embeddings()(inputs["input_ids"]).detach()
        with pytest.raises(UnsupportedModelError, match="reads the words"), torch.no_grad():
            model(inputs_embeds=words, pixel_values=inputs["pixel_values"], cache=oval.new_cache())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        attach(model, {"vision": {**vision, "clip": str(tmp_path / "none")}})
    model.config._name_or_path = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        attach(model, {"vision": vision})


def test_samples_for_clip_come_with_records() -> None:
    model, clip = clip_llava(-2), HfClipEmbedder(tiny_hf_clip(), LetterTokenizer())
    inputs = {**rows_of([[3, 5]], 16), "pixel_values": images(1, side=24)}
    with attach(model, {"vision": {"tile": 2}}) as oval:
        record, sample = record_prefill(oval, inputs, vectors=prompt_vectors(model, clip, Decoder()))[0]  # fmt: skip
    assert sample is not None
    assert sample.pages.shape == (4, 20)
    grid = Grid(4, 4)
    want = clip.embed_regions(clip.hidden_of(inputs["pixel_values"]), grid, tile_pages(grid, 2))[0]
    torch.testing.assert_close(sample.pages, want, atol=1e-5, rtol=1e-5)
    assert record.view is sample.view

"""`custom_generate=oval.speculative` with images: the tokens of plain decoding, whatever drafts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_speculative import ScriptedDrafter
from tiny_models import IMAGE_TOKEN, VOCAB, assert_same_run, one_thread, run
from tiny_towers import TOKENS, images, rows_of, tower_model

from oval_adapters import attach
from oval_adapters.speculative import drafters as home
from oval_spec.heads import create_heads
from oval_spec.layouts import save_heads

_one_thread = pytest.fixture(autouse=True)(one_thread)

NEW = 14
ROWS = [[2, 5, 6], [30], [0, 4]]


def inputs() -> dict[str, Any]:
    """Two images, none, one; padded."""
    given: dict[str, Any] = rows_of(ROWS, TOKENS["clip"])
    return {**given, "pixel_values": images(3), "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untrained heads for the tiny model."""
    folder: Path = tmp_path_factory.mktemp("llava") / "heads"
    torch.manual_seed(5)
    made = create_heads("medusa", {"num_heads": 3, "hidden_size": 48, "num_layers": 1})
    made.accuracy = [[0.4, 0.2], [0.2, 0.1], [0.1, 0.1]]
    save_heads(folder, made, home.base_facts(tower_model("clip")))
    return str(folder)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": ({"drafter": "medusa", "heads": "heads"}, {}),
    "medusa-tiers": ({"drafter": "medusa", "heads": "heads"}, {"tiers": {"fast_tokens": 192}}),
    "hybrid": ({"drafter": "hybrid", "heads": "heads", "ngram_min": 1}, {}),
    "self": ({"drafter": "self", "self_policy": "routed", "self_budget": 24}, {}),
    "ngram-routed": (
        {"drafter": "ngram", "ngram_min": 1},
        {"policy": "routed", "routing": {"budget_share": 1.0, "dense_layers": []}},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_drafters_keep_the_text(case: str, heads: str) -> None:
    speculation, config = SETTINGS[case]
    speculation = {k: heads if v == "heads" else v for k, v in speculation.items()}
    model = tower_model("clip")
    want = run(model, **inputs())
    with attach(model, {**config, "speculation": {**speculation, "turns_off": False}}) as oval:
        got = run(model, **inputs(), custom_generate=oval.speculative)
        assert_same_run(got, want)
        assert [len(row) for row in got.cache.images] == [2, 0, 1]
        assert oval.stats()["speculation"]["drafted"] > 0
        assert oval.stats()["vision"]["images_encoded"] == 3
        got.cache.paged.table.check_integrity()


@pytest.mark.parametrize("kind", ["right", "tree"])
def test_accepted_drafts_after_images(kind: str) -> None:
    model, given = tower_model("clip"), inputs()
    want = run(model, **given)
    starts = (given["attention_mask"] == 0).sum(1).tolist()
    texts = {row: ids[starts[row] :].tolist() for row, ids in enumerate(want.sequences)}
    drafter = ScriptedDrafter(texts, kind, VOCAB)
    with attach(model) as oval:
        got = run(
            model,
            **given,
            custom_generate=oval.speculative,
            oval_drafter=drafter,
            speculation={"max_nodes": 12, "turns_off": False},
        )
        assert_same_run(got, want)
        assert oval.stats()["speculation"]["accepted"] > NEW
        again = run(model, **given, custom_generate=oval.speculative)
        assert again.sequences.tolist() == want.sequences.tolist()
        assert oval.stats()["vision"] == {
            "images_encoded": 3,
            "images_reused": 3,
            "image_pages": 6 * 4,
        }


def test_a_drafted_image_token_is_text() -> None:
    """Nothing lies behind it: the model reads its embedding, as plain decoding would."""
    model, given = tower_model("clip"), inputs()
    want = run(model, **given)

    class Images(ScriptedDrafter):
        def _tree(self, request: Any) -> Any:
            return super()._tree(request).chain([request.ids[-1], IMAGE_TOKEN, IMAGE_TOKEN])

    with attach(model) as oval:
        got = run(
            model,
            **given,
            custom_generate=oval.speculative,
            oval_drafter=Images({}, "right", VOCAB),
            speculation={"turns_off": False},
        )
        assert_same_run(got, want)
        assert [len(row) for row in got.cache.images] == [2, 0, 1]

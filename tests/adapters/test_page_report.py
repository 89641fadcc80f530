"""Shares of pages equal Hugging Face's attention maps: windows, images, batches, speculation, tiers, and policies that select."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_reads import attention_maps, page_mass
from tiny_models import build, one_thread, padded, pictures, prompt, put_image
from tiny_towers import TOKENS, images, rows_of, tower_model

from oval_adapters import attach
from oval_adapters.page_report import ReadReport, watch_reads
from oval_adapters.page_report.watching import _pieces
from oval_core.errors import ConfigError

_one_thread = pytest.fixture(autouse=True)(one_thread)
NEW = 10


class Letters:
    """A tokenizer with a word a token."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)


def read(
    model: Any,
    ids: torch.Tensor,
    config: dict[str, Any] | None = None,
    *,
    row: int = 0,
    groups: int = 1,
    speculation: str | None = None,
    **inputs: Any,
) -> tuple[ReadReport, torch.Tensor]:
    """Generates on a watched cache; returns the report and the text [B, L]."""
    with attach(model, config) as oval, watch_reads(oval, layer_groups=groups) as reads:
        ways: dict[str, Any] = {}
        if speculation is not None:
            ways = {"custom_generate": oval.speculative, "speculation": {"drafter": speculation}}
        out = model.generate(ids, max_new_tokens=NEW, cache=reads.cache, **ways, **inputs)
        return reads.report(out, Letters(), prompt_columns=ids.shape[1], row=row), out


def check(report: ReadReport, maps: torch.Tensor, row: int = 0) -> None:
    asking = [token.column - 1 for token in report.tokens]
    pages = [page.columns for page in report.pages]
    layers = [layer for own in report.groups for layer in own]
    assert torch.allclose(report.mass.sum(1), torch.ones(len(asking)), atol=1e-4)
    want = page_mass(maps, row, asking, pages, layers)
    assert torch.allclose(report.mass, want, atol=2e-4), (report.mass - want).abs().max()
    for index, own in enumerate(report.groups):
        part = page_mass(maps, row, asking, pages, list(own))
        assert torch.allclose(report.by_group[index], part, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_shares_equal_attention_maps(name: str, speculation: str | None) -> None:
    model = build(name)
    ids = torch.cat([prompt(18), prompt(18)], 1)  # repeats, so that drafts are accepted
    report, out = read(model, ids, groups=2, speculation=speculation)
    check(report, attention_maps(model, out[:, :-1]))
    assert len(report.tokens) == NEW
    assert [len(own) for own in report.groups] == [2, 1]
    assert report.answer == Letters().decode(out[0, 36:].tolist())
    assert sorted(c for page in report.pages for c in page.columns) == list(range(36 + NEW - 1))
    assert report.pages[0].text == Letters().decode(out[0, :16].tolist())


def test_windows_hide_the_same_where_pages_come_from_a_slow_tier() -> None:
    model, ids = build("gemma2"), prompt(70)
    report, out = read(model, ids, {"page_size": 4, "tiers": {"fast_tokens": 64}})
    check(report, attention_maps(model, out[:, :-1]))


def test_a_plain_answer_is_not_changed_by_watching() -> None:
    model, ids = build("llama"), prompt(30)
    want = model.generate(ids, max_new_tokens=NEW)
    assert read(model, ids)[1].tolist() == want.tolist()


@pytest.mark.parametrize("config", [None, {"tiers": {"fast_tokens": 128}}])
def test_pages_of_images_are_tiles(config: dict[str, Any] | None) -> None:
    model = tower_model("clip")
    given = rows_of([[2, 5, 6]], TOKENS["clip"])
    ids = given.pop("input_ids")
    report, out = read(model, ids, config, pixel_values=images(2), **given)
    check(report, attention_maps(model, out[:, :-1], pixel_values=images(2)))
    assert [span.image for span in report.spans] == [0, 1]
    for number, span in enumerate(report.spans):
        own = [page for page in report.pages if page.span == number]
        assert sorted(p for page in own for p in page.places) == list(range(25))
        assert all(page.kind == "image" for page in own)
        assert own[0].places == (0, 1, 2, 5, 6, 7, 10, 11, 12)
        first = own[0].columns[0]
        assert first == span.start
        assert report.unread(number) == ()
    shares = report.mass[:, [kind == "image" for kind in report.kinds]].sum(1)
    assert torch.equal(report.image_share, shares)


def test_a_padded_row_of_a_batch_and_the_end_of_its_text() -> None:
    model = build("llama")
    given = padded([20, 31])
    ids, mask = given["input_ids"], given["attention_mask"]
    report, out = read(model, ids, attention_mask=mask, row=0)
    whole = torch.cat([mask, torch.ones(2, NEW - 1, dtype=torch.long)], 1)
    places = (whole.cumsum(1) - 1).clamp(min=0)
    check(report, attention_maps(model, out[:, :-1], attention_mask=whole, position_ids=places))
    assert report.pages[0].columns[0] == 11
    model.generation_config.eos_token_id = int(out[0, 31 + 3])
    first = out[0, 31:].tolist().index(int(out[0, 31 + 3]))
    shorter, _ = read(model, ids, attention_mask=mask, row=0)
    assert len(shorter.tokens) == first + 1


@pytest.mark.parametrize("policy", ["routed", "guarded"])
def test_policies_that_select_leave_pages_at_nothing(policy: str) -> None:
    model = build("llama", num_hidden_layers=4)
    routing = {"token_budget": 48, "window_size": 16, "num_sink_tokens": 8, "router": "persistence"}
    config = {"policy": policy, "routing": {**routing, "coverage": 0.5}}
    report, _ = read(model, prompt(160), config, groups=4)
    assert torch.allclose(report.mass.sum(1), torch.ones(NEW), atol=1e-4)
    unread = (report.by_group[:, 1:] == 0) & (torch.tensor([page.columns[-1] < 160 for page in report.pages]))  # fmt: skip
    assert not bool(unread[:2].any()), "dense layers read everything"
    assert bool(unread[2:].any()), "routed layers do not"


def test_what_a_budget_of_image_tokens_left_unread() -> None:
    model = build("llava")
    ids = prompt(30)
    put_image(ids, 0, 5)
    config = {"vision": {"tile": 1, "budget": 0.5, "router": "uniform"}}
    report, _ = read(model, ids, config, pixel_values=pictures(1))
    assert torch.allclose(report.mass.sum(1), torch.ones(NEW), atol=1e-4)
    held = [page.places[0] for page in report.pages if page.kind == "image"]
    assert len(held) == 2
    assert sorted([*held, *report.unread(0)]) == [0, 1, 2, 3]
    assert {page.columns[0] - 5 for page in report.pages if page.kind == "image"} == set(held)


def test_pages_that_are_cut_anew_keep_their_shares() -> None:
    model = build("llama", num_hidden_layers=4)
    routing = {
        "budget_share": 1.0,
        "router": "persistence",
        "sizing": "dynamic",
        "dense_layers": [],
    }
    report, _ = read(model, prompt(80), {"policy": "routed", "routing": routing})
    assert torch.allclose(report.mass.sum(1), torch.ones(NEW), atol=1e-4)
    assert sorted(c for page in report.pages for c in page.columns) == list(range(80 + NEW - 1))


def test_a_later_turn_on_the_same_cache() -> None:
    model, ids = build("llama"), prompt(20)
    with attach(model) as oval, watch_reads(oval) as reads:
        out = model.generate(ids, max_new_tokens=5, cache=reads.cache)
        asked = torch.cat([out, prompt(7, seed=4)], 1)
        out = model.generate(asked, max_new_tokens=NEW, cache=reads.cache)
        report = reads.report(out, Letters(), prompt_columns=asked.shape[1])
    assert report.tokens[0].column == 32
    check(report, attention_maps(model, out[:, :-1]))


def test_letters_of_several_tokens_come_with_the_last_of_them() -> None:
    texts = {1: "a", 2: "a\ufffd", 3: "a\u00e9", 4: "a\u00e9\ufffd"}

    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return texts[len(ids)]

    assert _pieces(Bytes(), [7, 8, 9, 9]) == ["a", "", "\u00e9", "\ufffd"]


def test_values_are_plain_and_the_best_pages_come_first() -> None:
    report, _ = read(build("llama"), prompt(40))
    values = report.to_dict(digits=3)
    assert len(values["mass"]) == NEW
    assert values["pages"][0]["kind"] == "text"
    best = report.top(0, 2)
    assert best[0][1] == pytest.approx(float(report.mass[0].max()))
    assert best[0][1] >= best[1][1]
    assert report.top(0, 9, "image") == []


def test_wrong_use_is_told() -> None:
    model, ids = build("llama"), prompt(30)
    with attach(model) as oval:
        with pytest.raises(ConfigError, match="layer_groups: got 9"), watch_reads(oval, layer_groups=9):  # fmt: skip
            pass
        with watch_reads(oval) as reads:
            out = model.generate(ids, max_new_tokens=4)  # another cache
            with pytest.raises(ConfigError, match="cache=reads.cache"):
                reads.report(out, Letters(), prompt_columns=30)
        with watch_reads(oval) as reads:
            ways = {"custom_generate": oval.speculative, "speculation": {"drafter": "self"}}
            out = model.generate(ids, max_new_tokens=6, cache=reads.cache, **ways)
            with pytest.raises(ConfigError, match="nobody watched"):
                reads.report(out, Letters(), prompt_columns=30)

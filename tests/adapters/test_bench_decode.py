"""The decode benchmark: who takes turns, what is counted, what is refused. No speed is asserted."""

import json
import sys

import pytest
import tiny_models
import torch

from oval_adapters.bench.decode import describe, measure_decode, num_ticks
from oval_adapters.bench.memory import MemoryMeter
from oval_adapters.bench.values import DecodeSettings
from oval_core.errors import ConfigError, PromptTooLongError

SMALL = DecodeSettings(contexts=(16, 40), steps=2, warmup=1, rounds=2, chunk=16)


def test_rows_compare_both_sides() -> None:
    model = tiny_models.shared("llama")
    ticks: list[str] = []
    rows = list(measure_decode(model, SMALL, ticks.append))
    assert [row.context for row in rows] == [16, 40]
    for row in rows:
        assert row.prompt_tokens == row.context
        assert row.ratio == pytest.approx(row.oval_ms_p50 / row.hf_ms_p50, rel=0.01)
        assert 0 < row.hf_ms_p50 <= row.hf_ms_p99
        assert 0 < row.oval_ms_p50 <= row.oval_ms_p99
        assert row.max_logit_diff < 1e-4
        tokens, config = row.context + SMALL.warmup + SMALL.steps, model.config
        per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        assert row.kv_bytes == tokens * per_token
        assert row.kv_bytes <= row.oval_kv_bytes_allocated <= row.kv_bytes + 32 * per_token
    assert len(ticks) == num_ticks(model.config, SMALL)
    order = list(dict.fromkeys(label for label in ticks if label.startswith("16 ")))
    assert [label.split()[-1] for label in order] == ["hf", "oval", "hf", "oval"]


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_models.shared("llama")
    before = set(model.__dict__), model.config._attn_implementation
    rows = measure_decode(model, SMALL)
    next(rows)
    rows.close()
    assert (set(model.__dict__), model.config._attn_implementation) == before


def test_the_last_step_still_has_a_position() -> None:
    model = tiny_models.shared("llama")
    limit = model.config.max_position_embeddings
    settings = DecodeSettings(contexts=(limit,), steps=3, warmup=1, rounds=1, chunk=128)
    (row,) = measure_decode(model, settings)
    assert (row.context, row.prompt_tokens) == (limit, limit - 4)


def test_too_few_positions_are_refused_at_the_door() -> None:
    model = tiny_models.shared("llama")
    limit = model.config.max_position_embeddings
    with pytest.raises(PromptTooLongError, match=f"Allowed: {limit}"):
        next(measure_decode(model, DecodeSettings(contexts=(16, limit + 1))))
    with pytest.raises(ConfigError, match="steps"):
        next(measure_decode(model, DecodeSettings(contexts=(16,), steps=limit)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contexts", ()),
        ("contexts", (16, 0)),
        ("steps", 0),
        ("rounds", 0),
        ("chunk", 0),
        ("warmup", -1),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="Allowed"):
        DecodeSettings(**{name: value})


def test_the_report_is_json_and_names_no_host() -> None:
    model = tiny_models.shared("llama")
    values = describe("tiny", model, SMALL, []).to_dict()
    assert json.loads(json.dumps(values)) == values | {"rows": []}
    assert (values["model"], values["dtype"], values["backend"]) == ("tiny", "float32", "torch")
    assert set(values["versions"]) == {"python", "oval-pack", "torch", "transformers"}
    assert set(values["machine"]) == {"cpu", "cores"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of a process")
def test_memory_that_came_and_went_counts() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    block = torch.ones(32, 2**20 // 4)
    del block
    peak = meter.peak_mb()
    meter.start()
    assert peak > 25
    assert meter.peak_mb() < peak / 2

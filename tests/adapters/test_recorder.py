"""A recording equals what Hugging Face's own attention maps say, and the model is left as it was."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from reference_recording import (
    DensePassage,
    reference_effect,
    reference_page_mass,
    reference_signal,
)
from tiny_models import build
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oval_adapters.routing import RecordOptions, record
from oval_adapters.routing.observer import Observer, Passage
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_core.routing.recording import Recording, load_recording, page_bounds
from oval_core.routing.view import PageHistory

CONTEXT, STEPS = 330, 70  # several pieces of each kind
OPTIONS = RecordOptions(
    page_size=8, page_sizes=(3, 12, 1), dense_layers=(1,), layer_groups=2, output_every=9
)
LAYERS = [[0, 2], [3]]  # of each group


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Four layers, so that a group has two of them."""
    return build("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, 160, (CONTEXT + STEPS,), generator=generator)


@pytest.fixture(scope="module")
def recording(model: PreTrainedModel, ids: torch.Tensor) -> Recording:
    return record(model, ids[:CONTEXT], ids[CONTEXT:], kind="toy", name="a", options=OPTIONS)


@pytest.fixture(scope="module")
def dense(model: PreTrainedModel, ids: torch.Tensor) -> DensePassage:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        done = model.model(
            ids[None], cache=cache, output_attentions=True, output_hidden_states=True
        )
    model.set_attn_implementation(before)
    return DensePassage(
        weights=[layer[0] for layer in done.attentions],
        values=[layer.values[0] for layer in cache.layers],
        keys=[layer.keys[0] for layer in cache.layers],
        hidden=done.last_hidden_state[0],
        inputs=[hidden[0] for hidden in done.hidden_states],
    )


def pages_of(recording: Recording, length: int) -> list[list[int]]:
    bounds = zip(recording.starts.tolist(), recording.counts.tolist(), strict=True)
    return [list(range(s, min(s + n, max(s, length)))) for s, n in bounds]


def test_pages_have_the_sizes_that_were_asked_for(recording: Recording) -> None:
    assert recording.counts[:4].tolist() == [3, 12, 1, 8]
    assert recording.starts[:4].tolist() == [0, 3, 15, 16]
    assert int(recording.counts.sum()) == CONTEXT + STEPS
    assert recording.group_of_layer == (0, -1, 0, 1)
    assert recording.token_bytes == 2 * 2 * 12 * 4


@pytest.mark.parametrize("step", [0, 1, 37, 63, 64, 69])
def test_mass_and_peak(recording: Recording, dense: DensePassage, step: int) -> None:
    token = CONTEXT + step
    pages = pages_of(recording, token + 1)
    for group, layers in enumerate(LAYERS):
        mass = reference_page_mass(dense, slice(token, token + 1), pages, layers)[:, :, 0]
        torch.testing.assert_close(
            recording.mass[step, group], mass.mean((0, 1)), atol=2e-6, rtol=1e-4
        )
        torch.testing.assert_close(
            recording.peak[step, group], mass.amax((0, 1)), atol=2e-6, rtol=1e-4
        )
    absent = ~recording.exists()[step]
    assert absent.tolist() == [not tokens for tokens in pages]
    assert not recording.mass[step, :, absent].any()


@pytest.mark.parametrize("step", [0, 40, 69])
def test_effect_is_the_output_without_the_page(
    recording: Recording, dense: DensePassage, step: int
) -> None:
    token = CONTEXT + step
    pages = pages_of(recording, token + 1)
    for group, layers in enumerate(LAYERS):
        effects = [
            reference_effect(dense, token, pages, layer, head)
            for layer in layers
            for head in range(4)
        ]
        want = torch.stack(effects).mean(0)
        torch.testing.assert_close(recording.effect[step, group], want, atol=1e-4, rtol=1e-3)


def test_partial_outputs_sum_to_the_output(recording: Recording, dense: DensePassage) -> None:
    assert recording.sampled.tolist() == list(range(0, STEPS, 9))
    for place, step in enumerate(recording.sampled.tolist()):
        token = CONTEXT + step
        pages = pages_of(recording, token + 1)
        mass = reference_page_mass(dense, slice(token, token + 1), pages, [0, 2, 3])[:, :, 0]
        torch.testing.assert_close(recording.part_mass[place], mass, atol=2e-6, rtol=1e-4)
        for at, layer in enumerate([0, 2, 3]):
            values = dense.values[layer].repeat_interleave(2, 0)
            output = (dense.weights[layer][:, token, None] @ values)[:, 0]
            parts = recording.part_output[place, at].float().sum(1)
            torch.testing.assert_close(parts, output, atol=2e-2, rtol=2e-2)
            page = recording.part_output[place, at, :, 4].float()
            own = recording.starts[4] + torch.arange(8)
            want = (dense.weights[layer][:, token, None, own] @ values[:, own])[:, 0]
            torch.testing.assert_close(page, want, atol=1e-3, rtol=1e-2)


def test_hidden_states_are_those_before_a_step(recording: Recording, dense: DensePassage) -> None:
    torch.testing.assert_close(
        recording.hidden, dense.hidden[CONTEXT - 1 : -1], atol=1e-4, rtol=1e-4
    )
    for page, tokens in enumerate(pages_of(recording, CONTEXT + STEPS)):
        want = dense.hidden[tokens].mean(0)
        torch.testing.assert_close(recording.page_hidden[page], want, atol=1e-4, rtol=1e-4)
    for step in (0, 1, 5, 6, 7, 50):
        tokens = [own for own in pages_of(recording, CONTEXT + step) if own][-1]
        want = dense.hidden[tokens].mean(0)
        torch.testing.assert_close(recording.newest_hidden[step], want, atol=1e-4, rtol=1e-4)


def signal_by_hand(
    recording: Recording,
    dense: DensePassage,
    model: PreTrainedModel,
    row: int,
    formula: str,
    *,
    ahead: bool = False,
) -> torch.Tensor:
    """[G, P] by the formula, from the keys that a row may know."""
    token = CONTEXT - 1 + row
    pages = pages_of(recording, token + 1)
    rotation = model.model.rotary_emb(dense.hidden[None], torch.tensor([[token]]))
    rows = []
    for layers in LAYERS:
        masses = []
        for layer in layers:
            module = model.model.layers[layer]
            source = dense.inputs[max(0, layer - 1) if ahead else layer][token]
            query = module.self_attn.q_proj(module.input_layernorm(source)).view(1, 4, 1, 12)
            query = apply_rotary_pos_emb(query, query, *rotation)[0][0, :, 0]
            for head in range(4):
                scores = torch.full((len(pages),), float("-inf"))
                for page, tokens in enumerate(pages):
                    if tokens:
                        keys = dense.keys[layer][head // 2, tokens]
                        extra = torch.tensor(len(tokens)).log() if formula == "mean_key" else 0.0
                        value = reference_signal(formula, query[head], keys, 12**-0.5)
                        scores[page] = value + extra
                masses.append(scores.softmax(0))
        rows.append(torch.stack(masses).mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("row", [0, 1, 7, STEPS])
@pytest.mark.parametrize(
    ("name", "formula"), [("quest", "quest"), ("mean_key", "mean_key"), ("cross_layer", "quest")]
)
@torch.no_grad()
def test_signals_know_the_tokens_up_to_their_query(
    recording: Recording,
    dense: DensePassage,
    model: PreTrainedModel,
    row: int,
    name: str,
    formula: str,
) -> None:
    ahead = name == "cross_layer"
    want = signal_by_hand(recording, dense, model, row, formula, ahead=ahead)
    got = recording.signals[name][row].exp()
    exists = want[0] > 0
    torch.testing.assert_close(got[:, exists], want[:, exists], atol=1e-5, rtol=1e-3)
    assert (got[:, ~exists] < 1e-6).all()
    if ahead:
        true = signal_by_hand(recording, dense, model, row, formula)
        assert (true - want).abs().max() > 1e-3, "the prediction is not the true query"


def test_infllm_counts_attention_from_the_next_queries(
    recording: Recording, dense: DensePassage
) -> None:
    # Group 1 is layer 3 alone. Both query heads of a KV head vote for the same tokens.
    row, token = 20, CONTEXT + 19
    weights = dense.weights[3]
    ages = torch.arange(len(dense.hidden))[:, None] - torch.arange(len(dense.hidden))
    received = (weights * (ages < 64)).sum(1).view(2, 2, -1).sum(1)
    pages = [own for own in pages_of(recording, token + 1) if own]
    masses = []
    for head in range(4):
        scores = []
        for number, tokens in enumerate(pages):
            own = torch.tensor(tokens)
            best = own[received[head // 2][own].topk(min(4, len(own))).indices]
            chosen = own if number == len(pages) - 1 else best
            # q.k from the map itself: the log of the weight, up to a constant of the row
            score = weights[head, token, chosen].log().mean()
            scores.append(score + torch.tensor(len(own)).log())
        masses.append(torch.stack(scores).softmax(0))
    got = recording.signals["infllm"][row, 1, : len(pages)].exp()
    torch.testing.assert_close(got, torch.stack(masses).mean(0), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("piece", [7, 40])
def test_attention_received_does_not_depend_on_the_pieces(piece: int) -> None:
    starts, counts = page_bounds(120, 8)
    observer = Observer(
        Passage(
            context=110,
            num_steps=10,
            starts=starts,
            counts=counts,
            group_of_layer=(0,),
            num_heads=4,
            num_kv_heads=2,
            output_every=0,
        )
    )
    query, keys, values = torch.randn(4, 120, 6), torch.randn(2, 120, 6), torch.randn(2, 120, 5)
    edges = [*range(0, 46, piece), 46, *range(46 + piece, 110, piece), 110, 120]
    for start, end in pairwise(edges):
        observer.attend(0, query[:, start:end], keys[:, :end], values[:, :end], 0.4)
    scores = 0.4 * query @ keys.repeat_interleave(2, 0).transpose(1, 2)
    ages = torch.arange(120)[:, None] - torch.arange(120)
    weights = scores.masked_fill(ages < 0, float("-inf")).softmax(-1)
    want = (weights * (ages < 64)).sum(1).view(2, 2, 120).sum(1)
    torch.testing.assert_close(observer._received[0], want)


def test_the_prompt_leaves_a_history_and_sums(recording: Recording, dense: DensePassage) -> None:
    pages = pages_of(recording, CONTEXT)
    history = PageHistory.empty(2, len(pages))
    by_layer = [reference_page_mass(dense, slice(CONTEXT), pages, layers) for layers in LAYERS]
    mass = torch.stack([own.mean((0, 1)) for own in by_layer], 1)  # [context, G, P]
    peak = torch.stack([own.amax((0, 1)) for own in by_layer], 1)
    for token in range(CONTEXT - 64, CONTEXT):
        read = (recording.starts <= token).expand(2, -1)
        history = history.observe(mass[token], peak[token], read)
    for name in ("last", "fast", "slow", "total", "steps", "peak", "chosen", "age"):
        got, want = getattr(recording.prompt_history, name), getattr(history, name)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(recording.snapkv, mass[-64:].mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(recording.h2o, mass.sum(0), atol=1e-4, rtol=1e-4)
    tova = torch.cat(by_layer)[:, :, -1].mean((0, 1))
    torch.testing.assert_close(recording.tova, tova, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(recording.prompt_mass[-1], recording.prompt_history.last)


def test_a_recording_comes_back_from_a_file(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.safetensors"
    recording.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["a.safetensors"]
    back = load_recording(path)
    for name in ("kind", "name", "context", "group_of_layer", "token_bytes"):
        assert getattr(back, name) == getattr(recording, name)
    for name in ("starts", "counts", "sampled", "part_output", "part_mass", "snapkv", "tova"):
        assert torch.equal(getattr(back, name), getattr(recording, name))
    for name in ("mass", "peak", "effect", "hidden", "page_hidden", "newest_hidden"):
        torch.testing.assert_close(
            getattr(back, name), getattr(recording, name), atol=1e-6, rtol=1e-3
        )
    assert back.signals.keys() == recording.signals.keys()
    assert torch.equal(back.prompt_history.last, recording.prompt_history.last)


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recording(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recording(path)


def test_the_model_is_left_as_it_was(model: PreTrainedModel, ids: torch.Tensor) -> None:
    maps = [dict(kind._global_mapping) for kind in (AttentionInterface, AttentionMaskInterface)]
    before = model.config._attn_implementation

    def check() -> None:
        assert model.config._attn_implementation == before
        now = [kind._global_mapping for kind in (AttentionInterface, AttentionMaskInterface)]
        assert now == maps
        assert not any(module._forward_pre_hooks for module in model.modules())

    record(model, ids[:9], ids[9:11])
    check()
    with pytest.raises(IndexError):
        record(model, ids[:9], torch.tensor([10_000]))  # no such token
    check()


@pytest.mark.parametrize("context", [1, 5, 64])
def test_a_short_prompt(model: PreTrainedModel, ids: torch.Tensor, context: int) -> None:
    options = RecordOptions(page_size=4, dense_layers=(), layer_groups=4, output_every=0)
    short = record(model, ids[:context], ids[context : context + 3], options=options)
    assert short.mass.shape == (3, 4, -(-(context + 3) // 4))
    torch.testing.assert_close(short.mass.sum(-1), torch.ones(3, 4))
    assert len(short.prompt_mass) == context
    assert len(short.sampled) == 0


BAD: dict[str, tuple[Callable[[PreTrainedModel, torch.Tensor], object], type[Exception], str]] = {
    "no steps": (lambda m, i: record(m, i[:4], i[:0]), ConfigError, "continuation_ids"),
    "a batch": (lambda m, i: record(m, i[None, :4], i[:4]), ConfigError, "prompt_ids"),
    "a name": (lambda m, i: RecordOptions(signals=("qest",)), ConfigError, "did you mean 'quest'"),
    "all dense": (
        lambda m, i: record(m, i[:4], i[:4], options=RecordOptions(dense_layers=(0, 1, 2, 3))),
        ConfigError,
        "dense_layers",
    ),
    "pages": (
        lambda m, i: record(m, i[:4], i[:4], options=RecordOptions(page_sizes=(9,))),
        ConfigError,
        "page sizes",
    ),
    "a window": (
        lambda m, i: record(build("mistral-window"), i[:4], i[:4]),
        UnsupportedModelError,
        "window",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_recorded_is_refused(
    model: PreTrainedModel, ids: torch.Tensor, case: str
) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(model, ids)


def test_page_bounds_cover_the_passage() -> None:
    starts, counts = page_bounds(21, 8, (2, 3))
    assert starts.tolist() == [0, 2, 5, 13]
    assert counts.tolist() == [2, 3, 8, 8]
    assert page_bounds(5, 8)[1].tolist() == [5]

"""Runs a model over a passage under full attention and records what each page received. Leaves the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oval_adapters.families import decoder_family
from oval_adapters.routing.observer import Observer, Passage
from oval_core.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, RoutingConfig, check_int
from oval_core.errors import ConfigError, UnsupportedModelError, did_you_mean
from oval_core.routing.key_signals import SIGNALS, create_signal
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.recording import Recording, page_bounds
from oval_core.routing.view import PageHistory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RecordOptions", "record"]

CROSS_LAYER = "cross_layer"
"""The signal `quest` with the query that the layer before predicts (InfiniGen, arXiv 2406.19707)."""

_PROMPT_PIECE, _STEP_PIECE = 128, 32
"""Queries whose attention over all tokens exists at a time; from twice as many on, half the time goes to the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """How a passage is cut into pages, and what is kept of it.

    Attributes:
        page_size: tokens a page.
        page_sizes: sizes of the first pages, where they differ; `page_size` holds for the rest.
        dense_layers: decoder layers that read everything and are not recorded.
        layer_groups: groups that the others are spread over.
        output_every: steps from one that keeps partial outputs to the next; 0 keeps none.
        signals: names of the key signals to record.
    """

    page_size: int = 16
    page_sizes: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = (0, 1)
    layer_groups: int = 3
    output_every: int = 8
    signals: tuple[str, ...] = (*SIGNALS, CROSS_LAYER)

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        check_int("output_every", self.output_every, 0, None)
        for name in self.signals:
            if name not in (*SIGNALS, CROSS_LAYER):
                hint = did_you_mean(name, (*SIGNALS, CROSS_LAYER))
                raise ConfigError(f"signals: got {name!r}; {hint}")


@torch.no_grad()
def record(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    continuation_ids: torch.Tensor,
    *,
    kind: str = "",
    name: str = "",
    options: RecordOptions | None = None,
) -> Recording:
    """Returns what the attention of one passage did under full attention, the continuation forced on the model.

    Args:
        model: a causal LM of the Llama kind, in evaluation mode.
        prompt_ids: long [N].
        continuation_ids: long [T], a step each.
        kind: what sort of passage it is.
        name: which one.
        options: pages and what to keep; None takes the defaults.
    Raises:
        UnsupportedModelError: the model has windows, soft caps, or no separate query projection, or is not on the CPU.
        ConfigError: an option, or the passage, is out of range.
    """
    options = options or RecordOptions()
    for what, ids in (("prompt_ids", prompt_ids), ("continuation_ids", continuation_ids)):
        if ids.ndim != 1 or not len(ids):
            raise ConfigError(
                f"{what}: got shape {tuple(ids.shape)}. Allowed: [n] with n >= 1. Give one row of tokens."
            )
    if model.device.type != "cpu":
        raise UnsupportedModelError(
            f"{type(model).__name__}: got a model on {model.device}. Allowed: cpu. Call model.to('cpu') first."
        )
    decoder = model.get_decoder()
    passage = passage_of(decoder.config, len(prompt_ids), len(continuation_ids), options)
    observer = Observer(passage)
    cache = DynamicCache(config=decoder.config)
    ids = torch.cat((prompt_ids, continuation_ids))
    hidden = []
    with listening(decoder, observer, ahead=CROSS_LAYER in options.signals):
        for start, end in pieces_of(passage):
            done = decoder(input_ids=ids[None, start:end], cache=cache, use_cache=True)
            hidden.append(done.last_hidden_state[0].float())
    signals = signals_of(observer, options.signals, cache, decoder)
    token_bytes = sum(
        kept.shape[1] * kept.shape[3] * kept.element_size()
        for kept in (cache.layers[passage.routed[0]].keys, cache.layers[passage.routed[0]].values)
    )
    facts = {"kind": kind, "name": name, "token_bytes": token_bytes}
    return finish_recording(observer, passage, torch.cat(hidden), signals, facts)


def passage_of(config: Any, context: int, num_steps: int, options: RecordOptions) -> Passage:
    windows = decoder_family(config).windows(config)
    if any(window is not None for window in windows):
        raise UnsupportedModelError(
            f"{config.model_type}: got layers with a sliding window. Allowed: layers that see all tokens. "
            "Record another model."
        )
    routing = RoutingConfig(dense_layers=options.dense_layers, layer_groups=options.layer_groups)
    groups = layer_groups(routing, windows)
    starts, counts = page_bounds(context + num_steps, options.page_size, options.page_sizes)
    return Passage(
        context=context,
        num_steps=num_steps,
        starts=starts,
        counts=counts,
        group_of_layer=tuple(groups.get(layer, -1) for layer in range(len(windows))),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        output_every=options.output_every,
    )


def pieces_of(passage: Passage) -> list[tuple[int, int]]:
    # Neither the observed end of the prompt nor the first step begins inside a piece.
    edges = (0, passage.context - passage.window, passage.context, passage.length)
    sizes = (_PROMPT_PIECE, _STEP_PIECE, _STEP_PIECE)
    return [
        (start, min(start + size, end))
        for size, begin, end in zip(sizes, edges, edges[1:], strict=False)
        for start in range(begin, end, size)
    ]


@contextlib.contextmanager
def listening(decoder: Any, observer: Observer, *, ahead: bool) -> Iterator[None]:
    """Runs the decoder's attention through the observer until the end of the block."""
    name = f"oval-record-{id(observer)}"
    before = decoder.config._attn_implementation

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if softcap is not None or dropout:
            raise UnsupportedModelError(
                f"{type(module).__name__}: got softcap {softcap} and dropout {dropout}. Allowed: neither. "
                "Call model.eval() first, or record another model."
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = observer.attend(module.layer_idx, query[0], key[0], value[0], scaling)
        return output.transpose(0, 1)[None].to(query.dtype), None

    hooks = []
    try:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, _no_mask)
        if ahead:
            hooks = _predict_queries(decoder, observer)
        decoder.config._attn_implementation = name
        yield
    finally:
        decoder.config._attn_implementation = before
        for hook in hooks:
            hook.remove()
        # transformers has no public call to unregister
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def signals_of(
    observer: Observer, names: Sequence[str], cache: DynamicCache, decoder: Any
) -> dict[str, torch.Tensor]:
    """Returns `Recording.signals`."""
    keys = {i: layer.keys[0] for i, layer in enumerate(cache.layers)}
    scaling = decoder.layers[0].self_attn.scaling
    found = {}
    for name in names:
        is_ahead = name == CROSS_LAYER
        signal = create_signal("quest" if is_ahead else name, scaling)
        found[name] = observer.log_mass(signal, keys, ahead=is_ahead)
    return found


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The observer masks by itself what lies ahead, and there is no padding."""


def _predict_queries(decoder: Any, observer: Observer) -> list[Any]:
    """Lets each layer's input, through the next layer's norm and projection, predict the next layer's query."""
    seen = [0] * len(decoder.layers)

    def hook_of(layer: int) -> Any:
        # The first layer has none before it that could tell: its own input does.
        follower = layer + 1

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rotation = kwargs["position_embeddings"]
            first, seen[layer] = seen[layer], seen[layer] + hidden.shape[1]
            if layer == 0:
                observer.note_ahead(0, query_ahead(module, hidden, rotation), first)
            if follower < len(decoder.layers):
                query = query_ahead(decoder.layers[follower], hidden, rotation)
                observer.note_ahead(follower, query, first)

        return hook

    for layer in decoder.layers:
        if not (hasattr(layer, "input_layernorm") and hasattr(layer.self_attn, "q_proj")):
            raise UnsupportedModelError(
                f"{type(layer).__name__}: has no input_layernorm or no q_proj, which {CROSS_LAYER!r} needs. "
                f"Allowed: layers with both. Leave {CROSS_LAYER!r} out of the signals."
            )
    return [
        module.register_forward_pre_hook(hook_of(layer), with_kwargs=True)
        for layer, module in enumerate(decoder.layers)
    ]


def query_ahead(
    layer: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Returns the query [H, n, D] that a decoder layer would make of this input [1, n, C], after RoPE."""
    attn = layer.self_attn
    query = attn.q_proj(layer.input_layernorm(hidden)).unflatten(-1, (-1, attn.head_dim))
    if hasattr(attn, "q_norm"):
        query = attn.q_norm(query)
    query = query.transpose(1, 2)
    return apply_rotary_pos_emb(query, query, *rotation)[0][0]


def finish_recording(
    observer: Observer,
    passage: Passage,
    hidden: torch.Tensor,
    signals: dict[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> Recording:
    p, window = passage, passage.window
    prompt = observer.mass[:window]
    layers = torch.bincount(torch.tensor([p.group_of_layer[layer] for layer in p.routed]))
    history = PageHistory.empty(p.num_groups, len(p.starts))
    for row in range(window):
        exists = (p.starts <= p.context - window + row).expand(p.num_groups, -1)
        history = history.observe(prompt[row], observer.peak[row], exists)
    page_of = torch.repeat_interleave(torch.arange(len(p.starts)), p.counts)
    by_page = observer.token_sum.new_zeros(p.num_groups, len(p.starts))
    prefix = torch.cat((hidden.new_zeros(1, hidden.shape[1]), hidden)).double().cumsum(0)
    ends = p.context + torch.arange(p.num_steps)  # tokens before each step
    begins = p.starts[page_of[ends - 1]]
    pages = prefix[p.starts + p.counts] - prefix[p.starts]
    newest = prefix[ends] - prefix[begins]
    return Recording(
        **facts,
        context=p.context,
        starts=p.starts,
        counts=p.counts,
        group_of_layer=p.group_of_layer,
        mass=observer.mass[window:].clone(),
        peak=observer.peak[window:].clone(),
        effect=observer.effect,
        hidden=hidden[p.context - 1 : -1].clone(),
        page_hidden=(pages / p.counts[:, None]).float(),
        newest_hidden=(newest / (ends - begins)[:, None]).float(),
        signals=signals,
        snapkv=prompt.mean(0),
        h2o=by_page.index_add(1, page_of, observer.token_sum),
        tova=(prompt[-1] * layers[:, None]).sum(0) / layers.sum(),
        prompt_mass=prompt.clone(),
        prompt_history=history,
        sampled=observer.sampled,
        part_mass=observer.part_mass,
        part_output=observer.part_output,
    )

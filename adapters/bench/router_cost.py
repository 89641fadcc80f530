"""What choosing pages costs: time on one thread, and floating point operations against the decoder's. Prints nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.recall_selector import SelectorScene, times_ms
from oval_adapters.bench.router_cost_values import RouterCostReport, RouterCostSettings
from oval_adapters.families import decoder_family
from oval_adapters.routing.resolve import resolve_router
from oval_core.config import RoutingConfig
from oval_core.routing.choose import choose
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.router import Router

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["decoder_flops", "measure_router", "outline"]


def measure_router(
    name: str, config: PretrainedConfig, settings: RouterCostSettings, dtype: torch.dtype
) -> RouterCostReport:
    """Times a router on sequences of random content, one thread, as a cache asks it between two forwards.

    Args:
        name: of the model.
        config: its config; the weights are not needed.
        settings: what to measure.
        dtype: of keys.
    Raises:
        ConfigError: there is no such router, or it was trained for another model.
    """
    model = outline(config)
    routing = RoutingConfig(
        router=settings.router or "auto",
        layer_groups=settings.layer_groups,
        budget_share=settings.budget,
    )
    router, is_trained = _router(model, routing, settings)
    scenes = [
        _scene(config, routing, settings, router, dtype, row) for row in range(settings.batch)
    ]
    # kernels of our own for bf16 would go uncounted
    counted = _scene(config, routing, settings, router, torch.float32, 0)
    with torch.no_grad(), _one_thread():
        times = _times(router, scenes, settings)
        view = counted.view(router)
        own = _flops(lambda: router.score(view))
        signal_flops = _flops(lambda: counted.view(router))
    context = settings.pages * settings.page_size
    decoder = decoder_flops(model, context)
    return RouterCostReport(
        router=router.name,
        is_trained=is_trained,
        **_percentiles(times),
        router_flops=own,
        signal_flops=signal_flops,
        decoder_flops=decoder,
        flops_ratio=(own + signal_flops) / decoder,
        router_parameters=_parameters(router),
        context=context,
        model=name,
        dtype=str(dtype).removeprefix("torch."),
        threads=1,
        settings=settings,
        versions=versions(),
        machine=machine(torch.device("cpu")),
    )


def outline(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the decoder without the memory of its weights: to count them."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config.get_text_config(decoder=True))


def decoder_flops(model: PreTrainedModel, context: int) -> int:
    """Returns the operations of one token after `context` others: two a weight, and attention over them in each layer.

    Embeddings and the head are left out, so that the ratio to something small is rather too large than too small.
    """
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}  # fmt: skip
    weights = sum(p.numel() for p in model.parameters() if id(p) not in outer)
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_attention_heads * dim * context * config.num_hidden_layers
    return 2 * weights + attention


def _scene(
    config: PretrainedConfig,
    routing: RoutingConfig,
    settings: RouterCostSettings,
    router: Router,
    dtype: torch.dtype,
    row: int,
) -> SelectorScene:
    return SelectorScene(
        config,
        routing,
        num_pages=settings.pages,
        page_size=settings.page_size,
        needs=router.needs,
        dtype=dtype,
        seed=settings.seed + row,
    )


def _router(
    model: PreTrainedModel, routing: RoutingConfig, settings: RouterCostSettings
) -> tuple[Router, bool]:
    """Returns the router that was asked for, or ships, or new weights; and whether it was trained."""
    router = resolve_router(routing, model)
    if settings.router is not None or isinstance(router, OutputAwareRouter):
        return router, isinstance(router, OutputAwareRouter)
    torch.manual_seed(settings.seed)
    groups = layer_groups(routing, decoder_family(model.config).windows(model.config))
    fresh = RouterConfig(hidden_size=model.config.hidden_size, num_groups=1 + max(groups.values()))
    return OutputAwareRouter(fresh).eval(), False


def _times(
    router: Router, scenes: Sequence[SelectorScene], settings: RouterCostSettings
) -> dict[str, list[float]]:
    """Returns the milliseconds of each round, by part; the part without a name is the whole."""
    views = [scene.view(router) for scene in scenes]
    scores = [router.score(view) for view in views]

    def signals() -> None:
        for scene in scenes:
            scene.view(router)

    def score() -> None:
        for view in views:
            router.score(view)

    def choice() -> None:
        for scene, own in zip(scenes, scores, strict=True):
            _choose(own, scene, settings)

    def whole() -> None:
        for scene in scenes:
            _choose(router.score(scene.view(router)), scene, settings)

    parts = {"": whole, "signals_": signals, "score_": score, "choose_": choice}
    return {part: times_ms(action, settings.rounds) for part, action in parts.items()}


def _choose(scores: torch.Tensor, scene: SelectorScene, settings: RouterCostSettings) -> None:
    kept = torch.zeros(len(scene.counts), dtype=torch.bool)
    choose(scores, scene.counts, kept, round(settings.budget * int(scene.counts.sum())))


def _percentiles(times: dict[str, list[float]]) -> dict[str, float]:
    found = {}
    for part, own in times.items():
        low, high = torch.tensor(own).quantile(torch.tensor([0.5, 0.99])).tolist()
        found |= {f"{part}p50_ms": round(low, 4), f"{part}p99_ms": round(high, 4)}
    return found


def _flops(action: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        action()
    return int(counter.get_total_flops())


def _parameters(router: Router) -> int:
    is_network = isinstance(router, torch.nn.Module)
    return sum(p.numel() for p in router.parameters()) if is_network else 0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

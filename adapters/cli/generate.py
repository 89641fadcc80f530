"""`oval generate`: text from a prompt, a chat turn or a file, on the paged cache."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.option_groups import with_options
from oval_adapters.cli.prompt_source import Source
from oval_adapters.cli.routing_options import RoutingOptions
from oval_adapters.cli.sampling import Sampling
from oval_adapters.cli.speculation_options import SpeculationOptions
from oval_adapters.cli.tier_options import TierOptions, check_for_model

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TextStreamer,
    )

    from oval_adapters.bench.timed_text import TimedText
    from oval_core.config import OvalConfig

Model = Annotated[str, typer.Option(help="smol, a folder, or a hub id OWNER/NAME.")]
Text = Annotated[str | None, typer.Argument(help="The same as --prompt.", show_default=False)]
Prompt = Annotated[str | None, typer.Option(help="Text to continue, as it is.")]
Chat = Annotated[str | None, typer.Option(help="A user's turn, put in the model's chat template.")]
File = Annotated[str | None, typer.Option(help="UTF-8 file to continue, as it is; - reads stdin.")]
System = Annotated[str | None, typer.Option(help="System message before --chat.")]
Config = Annotated[str | None, typer.Option(help="A shipped configuration or a YAML file.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens in a page, 1..32.")]
Backend = Annotated[str | None, typer.Option(help="Attention backend; `oval doctor` lists them.")]
NoOval = Annotated[bool, typer.Option("--no-oval", help="Run plain Hugging Face, to compare.")]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16; auto: bfloat16 where it is supported."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
# 512: half the peak memory of a whole prefill of 2048 tokens, for about a sixth more processor time.
PrefillChunk = Annotated[
    int, typer.Option(help="Tokens a forward of a long prompt: bounds its memory, shows progress.")
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Print as it comes, on by default unless --json is given; with --json: on stderr.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def register(app: typer.Typer) -> None:
    """Adds the command `generate`."""
    command = with_options(
        generate_command,
        speculation=SpeculationOptions,
        routing=RoutingOptions,
        tiers=TierOptions,
    )
    app.command("generate")(command)


def generate_command(
    ctx: typer.Context,
    text: Text = None,
    model: Model = "smol",
    prompt: Prompt = None,
    chat: Chat = None,
    file: File = None,
    system: System = None,
    config: Config = None,
    page_size: PageSize = None,
    backend: Backend = None,
    no_oval: NoOval = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    prefill_chunk: PrefillChunk = 512,
    stream: Stream = None,
    as_json: AsJson = False,
    debug: Debug = False,
    speculation: SpeculationOptions = SpeculationOptions(),
    routing: RoutingOptions = RoutingOptions(),
    tiers: TierOptions = TierOptions(),
) -> None:
    """Generate text with a Hugging Face model on OVAL's paged cache.

    tokens/s and decode_ms_p50 count decode steps only; the prompt's time is prefill_s.
    """
    from rich.console import Console

    if debug:
        ctx.find_root().params["debug"] = True
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, prefill_chunk)
    sampling.check()
    source = Source(_prompt(text, prompt), chat, file, system)
    text = source.read()
    console = Console(stderr=True)
    with console.status(f"loading {model}"):
        flags = [*speculation.flags, *routing.flags, *tiers.flags]
        _check_no_oval(no_oval, config, page_size, backend, flags)
        settings = None
        if not no_oval:
            settings = tiers.apply(routing.apply(_settings(config, page_size, backend)))
            settings = speculation.apply(settings)
        loaded = _load(model, dtype, device, settings, source, text, sampling)
    show = not as_json if stream is None else stream
    streamer = _text_streamer(loaded.tokenizer, to_stderr=as_json) if show else None
    result = _generate(console, loaded, settings, sampling, streamer)
    _print(console, result, as_json, show)
    from oval_adapters.bench.timed_text import INTERRUPTED

    if result.finish_reason == INTERRUPTED:
        from oval_adapters.cli.app import INTERRUPTED_STATUS

        console.print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED_STATUS)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, its tokenizer, the prompt's token ids [1, T], and what fits behind them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: torch.Tensor
    max_new_tokens: int


def _prompt(text: str | None, prompt: str | None) -> str | None:
    from oval_core.errors import ConfigError

    if text is not None and prompt is not None:
        raise ConfigError("prompt: got a text and --prompt. Allowed: one of them. Leave one out.")
    return prompt if text is None else text


def _settings(config: str | None, page_size: int | None, backend: str | None) -> OvalConfig:
    from oval_adapters.config_files import load_config

    changes = {"page_size": page_size, "backend": backend}
    return replace(load_config(config), **{name: v for name, v in changes.items() if v is not None})


def _check_no_oval(
    no_oval: bool,
    config: str | None,
    page_size: int | None,
    backend: str | None,
    flags: Sequence[str],
) -> None:
    from oval_core.errors import ConfigError

    options = {"--config": config, "--page-size": page_size, "--backend": backend}
    given = [name for name, value in options.items() if value is not None] + [*flags]
    if no_oval and given:
        raise ConfigError(
            f"no-oval: got it with {', '.join(given)}, which set up OVAL. Allowed: one or the other. Leave one out."
        )


def _load(
    model: str,
    dtype: str,
    device: str,
    settings: OvalConfig | None,
    source: Source,
    text: str,
    sampling: Sampling,
) -> Loaded:
    """Loads what is small first, so that a wrong prompt is found before the weights are read."""
    from oval_adapters.load_model import (
        load_config_of,
        load_model,
        load_tokenizer,
        resolve_device,
        resolve_dtype,
    )

    resolve_dtype(dtype, resolve_device(device))
    hf_config = load_config_of(model)
    if settings is not None:
        check_for_model(settings, hf_config)
    tokenizer = load_tokenizer(model)
    ids = source.encode(tokenizer, text, model)
    room = _room(hf_config, ids.shape[1])
    loaded = load_model(model, dtype, device)
    return Loaded(loaded, tokenizer, ids.to(loaded.device), min(sampling.max_new_tokens, room))


def _room(hf_config: PretrainedConfig, prompt_tokens: int) -> float:
    """Returns how many tokens may follow the prompt: the last one needs no position, nobody reads it."""
    from oval_adapters.cache_checks import check_positions
    from oval_core.errors import ConfigError

    limit = getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if prompt_tokens == 0:
        raise ConfigError(
            "prompt: the tokenizer made no token of it. Allowed: any text. Change it."
        )
    if limit is not None:
        check_positions(prompt_tokens, limit)
    return math.inf if limit is None else limit - prompt_tokens + 1


def _generate(
    console: Console,
    loaded: Loaded,
    settings: OvalConfig | None,
    sampling: Sampling,
    streamer: TextStreamer | None,
) -> TimedText:
    import torch

    from oval_adapters.bench.timed_text import generate_timed

    model, tokenizer, length = loaded.model, loaded.tokenizer, loaded.ids.shape[1]
    if loaded.max_new_tokens < sampling.max_new_tokens:
        note = f"at most {loaded.max_new_tokens} new tokens: the model has no more positions"
        console.print(note, style="dim", highlight=False)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    arguments = sampling.arguments(length) | {"max_new_tokens": loaded.max_new_tokens}
    if model.generation_config.pad_token_id is None:
        arguments["pad_token_id"] = tokenizer.eos_token_id
    with _prefill_bar(console, model, length, sampling.prefill_chunk) as hide:
        return generate_timed(model, tokenizer, loaded.ids, arguments, settings, streamer, hide)


@contextlib.contextmanager
def _prefill_bar(
    console: Console, model: PreTrainedModel, length: int, chunk: int
) -> Iterator[Callable[[], None] | None]:
    """Shows how much of a long prompt is through; gives a function that takes the bar away."""
    if length <= chunk or not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    progress = Progress(console=console, transient=True)
    task = progress.add_task(f"prefill of {length} tokens", total=length)
    hook = model.get_decoder().register_forward_hook(
        lambda *_: progress.update(task, advance=chunk)
    )

    def hide() -> None:
        hook.remove()
        progress.stop()

    progress.start()
    try:
        yield hide
    finally:
        hide()


def _text_streamer(tokenizer: PreTrainedTokenizerBase, *, to_stderr: bool) -> TextStreamer:
    from transformers import TextStreamer

    class StderrStreamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, file=sys.stderr, flush=True, end="\n" if stream_end else "")

    streamer = StderrStreamer if to_stderr else TextStreamer
    return streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _print(console: Console, result: TimedText, as_json: bool, streamed: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    if not streamed:
        typer.echo(result.text)
    parts = [f"{result.new_tokens} token{'' if result.new_tokens == 1 else 's'}"]
    if result.tokens_per_s is not None:
        parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    if result.prefill_s is not None:
        parts.append(f"prefill {result.prefill_s:.2f} s ({result.prompt_tokens} tokens)")
    parts.append(f"backend {result.stats['backend']}")
    if "peak_bytes" in result.stats:
        parts.append(f"cache {result.stats['peak_bytes'] / 1e6:.1f} MB")
    if "routing" in result.stats:
        parts.append(_routed(result.stats["policy"], result.stats["routing"]))
    if "tiers" in result.stats:
        parts.append(_moved(result.stats["tiers"]))
    if "speculation" in result.stats:
        parts.append(_speculated(result.stats["speculation"]))
    console.print(", ".join(parts), style="dim", highlight=False, soft_wrap=True)


def _routed(policy: str, routing: dict[str, Any]) -> str:
    """Returns what share of the text was read, and what it held if that was measured."""
    share, recall = routing["read_share"], routing["mass_recall"]
    if share is None:
        return f"{policy} by {routing['router']}: everything fitted the budget"
    held = "" if recall is None else f", {recall:.1%} of the attention mass"
    return f"{policy} by {routing['router']}, read {share:.0%} of the keys (lossy){held}"


def _speculated(stats: dict[str, Any]) -> str:
    """Returns what a forward brought, and by whom it was drafted."""
    lossy = "" if stats["lossless"] else " (lossy)"
    off = ", turned off as slower than plain decoding" if stats["is_off"] else ""
    if not stats["steps"]:
        return f"no draft by {stats['drafter']}: the text ended with the prompt's own token"
    return f"{stats['tau']:.2f} tokens a step by {stats['drafter']}{lossy}{off}"


def _moved(tiers: dict[str, Any]) -> str:
    """Returns how much came to fast memory, and how long layers waited for it."""
    moved = sum(tiers[f"bytes_{how}"] for how in ("prefetched", "demanded", "loaded"))
    size = f"{moved / 1e9:.1f} GB" if moved >= 1e9 else f"{moved / 1e6:.1f} MB"
    link = " (modelled link)" if tiers["link"] == "modelled link" else ""
    return f"moved {size}, waited {tiers['stall_s']:.2f} s{link}"

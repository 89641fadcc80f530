"""`oval demo`: builds the embedded models, asks about a picture, measures a little, and writes a page of what was read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.demo.run import Demo

_FAILED_STATUS = 1

Html = Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer questions, prompts and tokens.")]
Question = Annotated[str | None, typer.Option(help="About the picture, in place of the one that ships.")]  # fmt: skip
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="In place of the one that ships.")]  # fmt: skip
TextModel = Annotated[str, typer.Option(help="smol, a folder, or a hub id OWNER/NAME.")]
VisionModel = Annotated[str, typer.Option(help="A LLaVA model: smol-llava, a folder, or a hub id.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]


def register(app: typer.Typer) -> None:
    """Adds the command `demo`."""
    app.command("demo")(demo_command)


def demo_command(
    html: Html = Path("demo.html"),
    quick: Quick = False,
    question: Question = None,
    picture: Picture = None,
    text_model: TextModel = "smol",
    vision_model: VisionModel = "smol-llava",
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show OVAL at work on the embedded models: an answer about a picture, what it read, and the figures; some minutes.

    Builds smol and smol-llava if need be, answers speculatively with most pages outside of fast memory, asks a short sample
    in MMBench's form, measures drafts on a few prompts, and writes a page that stands alone.
    """
    from rich.console import Console

    from oval_adapters.cli.progress import step_bar
    from oval_adapters.demo.page import render_demo
    from oval_adapters.demo.run import run_demo
    from oval_adapters.demo.settings import DemoSettings
    from oval_adapters.load_model import resolve_device, resolve_dtype

    _check(html, picture)
    resolve_dtype(dtype, resolve_device(device))
    settings = DemoSettings(
        text_model=text_model,
        vision_model=vision_model,
        question=question,
        picture=picture,
        dtype=dtype,
        device=device,
        quick=quick,
    )
    log = Console(stderr=True)
    say = functools.partial(log.print, style="dim", markup=False, highlight=False, soft_wrap=True)
    demo = run_demo(settings, say, functools.partial(step_bar, log))
    html.write_text(render_demo(demo), encoding="utf-8", errors="xmlcharrefreplace")
    _show(Console(stderr=as_json), demo, html)
    if as_json:
        typer.echo(json.dumps({**demo.to_dict(), "html": str(html)}))
    if not demo.is_whole:
        raise typer.Exit(_FAILED_STATUS)


def _check(html: Path, picture: Path | None) -> None:
    from oval_core.errors import ConfigError

    if not html.absolute().parent.is_dir():
        raise ConfigError(f"html: no folder {html.parent}. Allowed: an existing one. Make it first.")  # fmt: skip
    if picture is not None and not picture.is_file():
        raise ConfigError(f"picture: no file {picture}. Allowed: a picture that Pillow reads. Check the path.")  # fmt: skip


def _show(console: Console, demo: Demo, html: Path) -> None:
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    parts = {name: part.values for name, part in demo.parts.items() if part.values}
    if "answer" in parts:
        own = parts["answer"]
        say(f"{own['model']}: {own['answer']}")
        say(_answer_line(own), style="dim")
    if "mmbench_sample" in parts:
        own = parts["mmbench_sample"]
        circular = "" if own["circular"] is None else f", {own['circular']:.0%} in every order of the options"  # fmt: skip
        say(f"MMBench-style sample: {own['vanilla']:.0%} of {own['questions']} questions right{circular} (guessing: 25%)")  # fmt: skip
    if "acceptance" in parts:
        own = parts["acceptance"]
        say(f"drafts ({own['model']}, {own['drafter']}): {_number(own['tau'])} tokens a forward, {_number(own['speedup'])} times the speed of plain decoding")  # fmt: skip
    for name, part in demo.parts.items():
        if part.reason:
            style = "red" if part.state == "failed" else "yellow"
            say(f"{name} {part.state}: {part.reason}", style=style)
    say(f"{demo.facts['seconds']:.0f} s; open {html} to see which pages each token read")


def _answer_line(own: dict[str, Any]) -> str:
    hits = "" if own["page_hit_rate"] is None else f", {own['page_hit_rate']:.0%} of the pages found in fast memory"  # fmt: skip
    return (
        f"{own['tokens']} tokens, {_number(own['tau'])} a forward ({own['drafter']}); {own['image_pages']} pages of the picture, "
        f"{own['text_pages']} of text; {own['bytes_prefetched'] / 1e6:.1f} MB prefetched, waited {1e3 * own['stall_s']:.0f} ms{hits}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""`oval demo`: builds the embedded models, asks about a picture, measures a little, and writes a page of what was read."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

    Builds smol and smol-llava if need be, answers speculatively with a fast memory that is too small for the text, asks a
    short sample in MMBench's form, measures drafts on a few prompts, and writes a page that stands alone.
    """
    began = time.perf_counter()
    _check(html, picture, text_model, vision_model)
    from rich.console import Console

    from oval_adapters.cli.progress import step_bar
    from oval_adapters.demo.door import check_models
    from oval_adapters.demo.page import render_demo
    from oval_adapters.demo.run import run_demo
    from oval_adapters.demo.settings import DemoSettings
    from oval_adapters.load_model import resolve_device, resolve_dtype

    resolve_dtype(dtype, resolve_device(device))
    check_models(text_model, vision_model)
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
    demo = run_demo(settings, say, functools.partial(step_bar, log), began=began)
    html.write_text(render_demo(demo), encoding="utf-8", errors="xmlcharrefreplace")
    _show(Console(stderr=as_json), demo, html)
    if as_json:
        typer.echo(json.dumps({**demo.to_dict(), "html": str(html)}))
    if not demo.is_whole:
        raise typer.Exit(_FAILED_STATUS)


def _check(html: Path, picture: Path | None, text_model: str, vision_model: str) -> None:
    """Refuses what cannot work, before torch is even imported."""
    from oval_adapters.cli.output_paths import check_output_file
    from oval_adapters.demo.door import check_names, check_page, check_picture

    check_output_file("html", html)
    if picture is not None:
        check_page(html, picture)
        check_picture(picture)
    check_names(text_model, vision_model)


def _show(console: Console, demo: Demo, html: Path) -> None:
    from oval_adapters.demo.wording import acceptance_line, answer_lines, sample_line

    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    parts = {name: part.values for name, part in demo.parts.items() if part.values}
    if "answer" in parts:
        first, *others = answer_lines(parts["answer"])
        say(first)
        for line in others:
            say(line, style="dim")
    if "mmbench_sample" in parts:
        say(sample_line(parts["mmbench_sample"]))
    if "acceptance" in parts:
        say(acceptance_line(parts["acceptance"]))
    for name, part in demo.parts.items():
        if part.reason:
            style = "red" if part.state == "failed" else "yellow"
            say(f"{name} {part.state}: {part.reason}", style=style)
    say(f"{demo.facts['seconds']:.0f} s; open {html} to see which pages each token read")

"""Budgets of image tokens: accuracy and time of every router against dense, over the same questions, in one process.

    python benchmarks/image_budgets.py --model smol-llava --data known.tsv --data albums.tsv --questions 30,50 --tile 2 \\
        --routers fusion=ROUTER,clip,key-mean,uniform,random,downsample --clip CLIP --out FOLDER [--part 1/2]
    python benchmarks/image_budgets.py --decode --model smol-llava --data albums.tsv --questions 4 --tile 2

The model is loaded once; a question is asked under all settings one after the other, in a seeded order of its own, so that a
machine's drift meets all of them. Time: from pictures in memory to the text of the answer, vision tower and choice of pages
included; no feature is reused. A row a question and setting lies in --out at once: the same command goes on, and `--part 2/2`
shares the questions with another process. The last line of stdout is JSON. With --decode: see image_decode.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from image_budget_rows import DENSE, DOWNSAMPLE, AnswerRow, AnswersOnDisk, Asked, Setting, summarise
from image_decode import measure_decode
from rich.console import Console
from rich.progress import Progress

from oval_adapters import attach
from oval_adapters.bench.machine import machine, versions
from oval_adapters.evaluation.mm_mmbench import make_plan
from oval_adapters.evaluation.mm_model import Asker, check_vision_model, load_processor
from oval_adapters.evaluation.mm_run import Ask
from oval_adapters.load_model import load_model
from oval_adapters.vision.prefill_settings import create_choice
from oval_core.errors import ConfigError, OvalError
from oval_core.vision_config import VisionConfig
from oval_mm.fusion_checkpoint import WEIGHTS_NAME
from oval_mm.mmbench import read_mmbench
from oval_mm.mmbench_report import judge
from oval_mm.page_choice import SCORER_NAMES
from oval_mm.pictures import PictureError

ROUTERS = "key-mean,uniform,random,downsample"
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Questions of all tables, with what asks them."""

    asked: list[Asked]
    asks: list[Ask]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True)
    add("--data", action="append", required=True, type=Path, help="a table of MMBench's form")
    add("--out", type=Path, help="folder for rows; the same command goes on")
    add("--questions", default="30", help="of each task; one number, or one a table with commas")
    add("--budgets", default="50%,33%,25%,11%")
    add("--routers", default=ROUTERS, help="names, LABEL=FOLDER for trained ones, downsample")
    add("--clip", help="CLIP of the router clip")
    add("--tile", type=int, default=VisionConfig().tile)
    add("--pages-per-image", type=int, default=VisionConfig().pages_per_image)
    add("--circular", action="store_true", help="every order of the options")
    add("--max-new-tokens", type=int, default=4, help="of an answer: a letter is asked for")
    add("--part", default="1/1", help="i/n: this process asks every n-th question")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto")
    add("--decode", action="store_true", help="decode routing on long answers instead")
    add("--shares", default="20%,33%,50%", help="with --decode: of the tokens, read a step")
    add("--decode-router", default="auto", help="with --decode: see routing.router")
    add("--new-tokens", type=int, default=48, help="with --decode: of an answer")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Asks, and prints the result as JSON."""
    options = parse_options(argv)
    check_vision_model(options.model)
    drawn = draw(options.data, options.questions, options.seed, circular=options.circular)
    console = Console(stderr=True)
    processor = load_processor(options.model)
    model = load_model(options.model, options.dtype, "cpu")
    facts = {
        "model": Path(options.model).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tile": options.tile,
        "seed": options.seed,
        "versions": versions(),
        "machine": machine(model.device),
    }
    with Progress(console=console) as bars:
        bar = bars.add_task("")

        def tick(label: str, done: int, total: int) -> None:
            bars.update(bar, description=label, completed=done, total=total)

        if options.decode:
            shares = tuple(_shares(options.shares))
            found = measure_decode(
                model,
                processor,
                drawn.asks,
                shares=shares,
                router=options.decode_router,
                new_tokens=options.new_tokens,
                tile=options.tile,
                tick=tick,
            )
        else:
            found = measure(model, processor, drawn, options, tick)
    print(json.dumps({**found, **facts}))


def draw(data: Sequence[Path], questions: str, seed: int, *, circular: bool) -> Drawn:
    """Returns so many questions of each task of each table, tasks in turn: a part of a run is balanced too."""
    counts = [int(part) for part in questions.split(",")]
    if len(counts) not in (1, len(data)):
        raise ConfigError(
            f"questions: got {len(counts)} numbers for {len(data)} tables. Allowed: one, or one a table. Give these."
        )
    found: list[tuple[int, Asked, Ask]] = []
    for place, path in enumerate(data):
        plan = make_plan(path.name, read_mmbench(path), circular=circular)
        by_task: dict[str, list[int]] = {}
        for question in plan.questions:
            if question.is_base and question.answer is not None:
                by_task.setdefault(question.category, []).append(question.group)
        rank = {}
        for groups in by_task.values():
            random.Random(seed).shuffle(groups)
            rank |= {group: at for at, group in enumerate(groups[: counts[place % len(counts)]])}
        for question, ask in zip(plan.questions, plan.asks(), strict=True):
            if question.group in rank:
                own = Asked(unit=0, table=path.stem, question=question)
                found.append((rank[question.group], own, ask))
    found.sort(key=lambda own: own[0])
    asked = [
        Asked(unit=unit, table=own.table, question=own.question)
        for unit, (_, own, _) in enumerate(found)
    ]
    return Drawn(asked=asked, asks=[ask for _, _, ask in found])


def list_settings(budgets: str, routers: str) -> tuple[list[Setting], dict[str, str]]:
    """Returns all settings, dense first, and what `vision.router` is by label."""
    names, digests = {}, {}
    for part in routers.split(","):
        label, _, folder = part.rpartition("=")
        label = label or (part if part in (*SCORER_NAMES, DOWNSAMPLE) else Path(part).name)
        weights = Path(folder) / WEIGHTS_NAME
        names[label], digests[label] = folder, ""
        if weights.is_file():
            names[label] = str(Path(folder).absolute())
            digests[label] = hashlib.sha256(weights.read_bytes()).hexdigest()[:6]
    settings = [Setting(router=DENSE)]
    for budget in _shares(budgets):
        settings += [Setting(router=name, budget=budget, digest=digests[name]) for name in names]
    return settings, {name: own for name, own in names.items() if name != DOWNSAMPLE}


def measure(
    model: Any, processor: Any, drawn: Drawn, options: argparse.Namespace, tick: Tick
) -> dict[str, Any]:
    """Asks this process's part of the questions, and returns what all rows in the folder add up to."""
    if options.out is None:
        raise ConfigError("out: got none. Allowed: a folder for rows. Name one.")
    settings, names = list_settings(options.budgets, options.routers)
    part, parts = (int(own) for own in options.part.split("/"))
    facts = (options.model, str(model.dtype), options.tile, options.pages_per_image, options.clip, options.max_new_tokens)  # fmt: skip
    listed = [[ask.text, list(map(str, ask.pictures))] for ask in drawn.asks]
    stamp = hashlib.sha256(json.dumps([facts, listed]).encode()).hexdigest()[:24]
    kept = AnswersOnDisk(options.out, stamp, part - 1)
    done = kept.read()
    kept.open()
    mine = [unit for unit in range(len(drawn.asks)) if unit % parts == part - 1]
    left = [unit for unit in mine if any((unit, s.key) not in done for s in settings)]
    asker = SettingAsker(model, processor, options, names)
    with contextlib.suppress(KeyboardInterrupt):
        if left:
            asker.warm_up(drawn.asks[left[0]], settings)
        for number, unit in enumerate(left, start=1):
            order = list(settings)
            random.Random(f"{options.seed}:{unit}").shuffle(order)
            for setting in order:
                if (unit, setting.key) not in done:
                    kept.add(asker.row(drawn.asked[unit], drawn.asks[unit], setting))
            tick(drawn.asked[unit].table, number, len(left))
    rows = kept.read()
    return {
        "tables": summarise(drawn.asked, settings, rows),
        "whole": all((own.unit, s.key) in rows for own in drawn.asked for s in settings),
        "pages_per_image": options.pages_per_image,
        "routers": {name: Path(own).name for name, own in names.items()},
    }


class SettingAsker:
    """Asks one model under any setting. Each ask is a new attachment: nothing of another setting is reused."""

    def __init__(
        self, model: Any, processor: Any, options: argparse.Namespace, names: dict[str, str]
    ) -> None:
        self._model, self._processor, self._options = model, processor, options
        pages = {"tile": options.tile, "pages_per_image": options.pages_per_image}
        self._vision = {**pages, "reuse_images": 0}
        self._choices = {
            label: create_choice(
                VisionConfig(
                    budget=0.5, router=name, clip=options.clip, seed=options.seed, **pages
                ),
                model,
            )
            for label, name in names.items()
        }

    def warm_up(self, ask: Ask, settings: Sequence[Setting]) -> None:
        """Asks one question under each kind of setting, for nothing."""
        for setting in {setting.router: setting for setting in settings}.values():
            with contextlib.suppress(OvalError, PictureError):
                self._answer(ask, setting)

    def row(self, own: Asked, ask: Ask, setting: Setting) -> AnswerRow:
        """Asks a question; one that cannot be asked gives its reason."""
        answer, reason, ms, router_ms, tokens = None, None, 0.0, 0.0, (0, 0)
        try:
            answer, ms, router_ms, tokens = self._answer(ask, setting)
        except (PictureError, OvalError) as error:
            reason = " ".join(str(error).split())
        return AnswerRow(
            unit=own.unit,
            setting=setting.key,
            answer=answer,
            hit=bool(judge(own.question, answer).hit),
            reason=reason,
            ms=ms,
            router_ms=router_ms,
            image_tokens=tokens[0],
            image_tokens_read=tokens[1],
        )

    def _answer(self, ask: Ask, setting: Setting) -> tuple[str, float, float, tuple[int, int]]:
        images = [ask.load(name) for name in ask.pictures]
        vision = dict(self._vision)
        if setting.is_routed:
            vision |= {"budget": setting.budget, "router": "uniform"}
        with attach(self._model, {"vision": vision}) as oval:
            routing = oval.image_routing
            if routing is not None:
                choice = self._choices[setting.router]
                assert choice is not None, "made with a budget"
                routing.use(choice.scorer, choice.vectors)
            asker = Asker(
                oval,
                self._processor,
                max_new_tokens=self._options.max_new_tokens,
                downsample=setting.budget if setting.router == DOWNSAMPLE else None,
            )
            prompt = asker.prompt(ask.text, len(images))
            start = time.perf_counter()
            answer = asker.answer(prompt, images)
            ms = 1e3 * (time.perf_counter() - start)
            router_s = 0.0 if routing is None else routing.stats()["router_seconds"]
            return answer, ms, 1e3 * router_s, asker.image_tokens


def _shares(text: str) -> list[float]:
    try:
        found = [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < own <= 1 for own in found):
        raise ConfigError(f"budgets: got {text!r}. Allowed: shares such as 33%,25%. Give these.")
    return found


if __name__ == "__main__":
    main()

"""The demo's two short evaluations, by the code of `oval eval`: the sample in MMBench's form, and acceptance of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oval_adapters.attachment import attach
from oval_adapters.config_files import load_config
from oval_adapters.demo.settings import DemoSettings, demo_file
from oval_adapters.evaluation.mm_mmbench import make_plan, mmbench_report
from oval_adapters.evaluation.mm_run import MMSettings, collect
from oval_adapters.evaluation.prompt_files import read_prompts, take
from oval_adapters.evaluation.ranks import Ranks
from oval_adapters.evaluation.report import make_report
from oval_adapters.evaluation.run import measure, warm_up
from oval_adapters.evaluation.settings import PLAIN, AcceptanceSettings, parse_sides
from oval_adapters.evaluation.units import make_units
from oval_adapters.load_model import load_config_of, load_model, load_tokenizer
from oval_mm.mmbench import read_mmbench

if TYPE_CHECKING:
    from oval_adapters.evaluation.mm_run import StepBar

__all__ = ["measure_acceptance", "measure_sample"]

_SAMPLE = "mmbench_sample.tsv"
_SIDE = "auto:turns_off=false"  # what is accepted is measured, also where drafting is slower here
_QUICK_QUESTIONS = 5
_QUICK_PROMPTS = 2
_LEAST_PROMPTS = 4  # fewer say nothing about others
_SHOWN = ("questions", "vanilla", "circular", "intervals", "by_category", "failed_rows", "rows", "seconds_per_question")  # fmt: skip
_FIGURES = ("prompts", "identical", "tau", "tau_interval", "accepted_by_position", "draft_acceptance_rate", "tokens_per_s", "plain_tokens_per_s", "speedup")  # fmt: skip


def measure_sample(settings: DemoSettings, step_bar: StepBar) -> dict[str, Any]:
    """Asks the vision model the sample's questions; returns the figures and a row a question."""
    asked = MMSettings(
        model=settings.vision_model,
        config=load_config(None),
        dtype=settings.dtype,
        device=settings.device,
        max_new_tokens=8,
    )
    file = read_mmbench(demo_file(_SAMPLE))
    limit = _QUICK_QUESTIONS if settings.quick else None
    plan = make_plan(_SAMPLE, file, circular=True, limit=limit)
    collected = collect(asked, plan.asks(), Ranks(), step_bar)
    if not collected.whole:
        raise KeyboardInterrupt  # the run keeps what it has; a demo that was stopped is over
    report = mmbench_report(plan, collected, asked.to_dict())
    rows = [
        {"index": row["index"], "category": row["category"], "answer": row["answer"], "hit": row["hit"]}
        for row in report.results
    ]  # fmt: skip
    values = {name: report.values[name] for name in _SHOWN}
    orders = len(plan.questions) // len({question.group for question in plan.questions})
    return {**values, "orders": orders, "answers": rows}


def measure_acceptance(settings: DemoSettings, step_bar: StepBar) -> dict[str, Any]:
    """Decodes the bundled prompts with and without drafts; returns the figures."""
    asked = AcceptanceSettings(
        model=settings.text_model,
        prompts=str(demo_file("prompts.jsonl")),
        sides=parse_sides(_SIDE, {}),
        limit=_QUICK_PROMPTS if settings.quick else None,
        max_new_tokens=settings.answer_tokens,
    )
    prompts = take(read_prompts(asked.prompts), asked.limit, asked.per_category)
    tokenizer, hf_config = load_tokenizer(asked.model), load_config_of(asked.model)
    units, skipped = make_units(tokenizer, hf_config, prompts, asked.max_new_tokens, 1)
    model = load_model(asked.model, settings.dtype, settings.device)
    rows = []
    with attach(model) as oval, step_bar() as step:
        step("warming up", 0, len(units))
        warm_up(oval, units[0], asked)
        for row in measure(oval, units, asked):
            rows.append(row)
            step(row.category, len(rows), len(units))
        drafter = oval.stats()["speculation"]["drafter"]
        report = make_report(
            asked,
            rows,
            oval,
            whole=True,
            skipped=skipped,
            num_later_turns=0,
            processes=1,
            tiers=None,
        )
    own = report.overall[asked.sides[0].label].to_dict()
    plain = report.overall[PLAIN]
    return {
        "model": asked.model.rsplit("/", 1)[-1],
        "dtype": report.facts["dtype"],
        "drafter": drafter,
        "new_tokens": plain.new_tokens,
        **{name: own[name] for name in _FIGURES},
        "tau_interval": own["tau_interval"] if own["prompts"] >= _LEAST_PROMPTS else None,
    }

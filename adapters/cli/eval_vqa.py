"""`oval eval vqa`: asks a LLaVA model questions with short answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oval_adapters.cli.eval_mmbench import AnswerOptions, Model, run_evaluation
from oval_adapters.cli.option_groups import with_options
from oval_adapters.cli.speculation_options import SpeculationOptions
from oval_adapters.cli.vision_options import VisionOptions

Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Questions: VQAv2's or TextVQA's .json, .jsonl with a row a question, or a .tsv.",
    ),
]
Annotations = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Answers, where they are apart: VQAv2's .json.")
]
Images = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Of the images. Default: beside the file.")
]


def register(group: typer.Typer) -> None:
    """Adds `vqa` to the group `eval`."""
    group.command("vqa")(
        with_options(
            vqa_command,
            options=AnswerOptions,
            vision=VisionOptions,
            speculation=SpeculationOptions,
        )
    )


def vqa_command(
    model: Model,
    data: Data,
    options: AnswerOptions,
    vision: VisionOptions,
    speculation: SpeculationOptions,
    annotations: Annotations = None,
    images: Images = None,
) -> None:
    """Ask a LLaVA model questions with short answers: soft accuracy over what ten people said, with the official text rules.

    --strict wants ten answers of every question, and counts rows that fail as wrong. Several processes share the rows:
    accelerate launch --multi_gpu --num_processes 2 $(which oval) eval vqa ... or torchrun.
    """
    from oval_adapters.evaluation.mm_vqa import vqa_asks, vqa_report
    from oval_adapters.evaluation.ranks import ranks
    from oval_mm.vqa_files import read_vqa

    settings = options.settings(model, vision, speculation)
    with ranks() as us:
        file = read_vqa(data, annotations=annotations, images=images, strict=bool(options.strict))
        questions = file.questions[: options.limit]
        run_evaluation(
            vqa_asks(file, questions),
            settings,
            options,
            us,
            lambda collected: vqa_report(
                data.name,
                file,
                questions,
                collected,
                settings.to_dict(),
                strict=bool(options.strict),
            ),
        )

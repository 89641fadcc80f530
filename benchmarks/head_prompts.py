"""Writes the prompts, beside those that a model writes itself, on whose answers the shipped draft heads were trained.

GSM8K questions, and tasks over passages of WikiText-2: summaries, main points, plain words, who and what. With the
defaults these are the prompts of `assets/heads/smol`:

    python benchmarks/head_prompts.py --questions gsm8k_train.jsonl --passages wikitext2_valid.txt --out prompts.jsonl
    oval train medusa --model smol --data self --prompts 832 --data prompts.jsonl --heads 5 --epochs 3 --learning-rate 4e-3 --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TASKS = (
    "Summarize: {p}",
    "Write a short summary of the following text.\n\n{p}",
    "What are the main points of this passage?\n\n{p}",
    "Answer the question based on the text below. What is this text about?\n\n{p}",
    "Rewrite the following text in simple words:\n\n{p}",
    "Who or what is mentioned in the following text?\n\n{p}",
)
_ROUND = 32  # prompts of each sort that are taken in turn
_TIDY = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" ,", ","), (" .", "."))


def main() -> None:
    """Reads both files and writes one JSON line a prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=Path, required=True, help="GSM8K, JSON lines")
    parser.add_argument("--passages", type=Path, required=True, help="WikiText, a paragraph a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=13, help="of 32 prompts of each sort")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = make_prompts(
        arguments.questions, arguments.passages, arguments.rounds, arguments.seed
    )
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts in {arguments.out}")


def make_prompts(questions: Path, passages: Path, rounds: int, seed: int) -> list[str]:
    """Returns 32 questions and 32 tasks for each round."""
    draw = random.Random(seed)
    asked = [json.loads(line)["question"] for line in questions.read_text("utf-8").splitlines()]
    draw.shuffle(asked)
    text = passages.read_text("utf-8")
    for before, after in _TIDY:
        text = text.replace(before, after)
    read = [line.strip() for line in text.split("\n") if 300 < len(line) < 1600]
    draw.shuffle(read)
    made: list[str] = []
    for turn in range(rounds):
        span = slice(turn * _ROUND, (turn + 1) * _ROUND)
        made += asked[span]
        made += [TASKS[(turn + i) % len(TASKS)].format(p=p) for i, p in enumerate(read[span])]
    return made


if __name__ == "__main__":
    main()

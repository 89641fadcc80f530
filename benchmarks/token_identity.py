"""Are speculative texts Hugging Face's, token for token? Every drafter on every prompt, in float32, greedily.

    python benchmarks/token_identity.py --prompts spec_bench.jsonl --out FOLDER            (goes on where it was cut off)
    python benchmarks/token_identity.py --prompts spec_bench.jsonl --out FOLDER --part 0/2  (in two processes; then all)

Hugging Face decodes each batch by itself. On OVAL the prompt is read once and each drafter goes on from a copy of that
cache, as a second turn would. Every 20th prompt is also decoded with logits processors and stopping rules, the prompt
included. A later run adds the drafters that are missing. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from oval_adapters.bench.machine import machine, versions
from oval_adapters.evaluation.prompt_files import read_prompts

if TYPE_CHECKING:
    import torch

    from oval_adapters import Attachment

DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "hybrid": {"drafter": "hybrid", "max_nodes": 8},
    "ngram": {"drafter": "ngram", "max_nodes": 8},
    "none": {"drafter": "none"},
    "medusa": {"drafter": "medusa", "max_nodes": 8},
    "draft": {"drafter": "draft", "draft_model": "smol", "depth": 3, "max_nodes": 4},
    "self": {
        "drafter": "self",
        "self_policy": "window",
        "self_budget": 128,
        "depth": 3,
        "max_nodes": 4,
    },
}
"""Few nodes a tree: identity does not hang on how many, and float32 takes its time. And fixed ones: where they are chosen by cost, drafts that do not pay here would not be made, and nothing be proved."""
EVERY = 20
"""Of the prompts, every 20th is also decoded with processors."""
VARIED = ("hybrid", "ngram")
"""By these drafters. A hybrid tree is heads' and n-grams'."""


class EndsOnSeven:
    """A stopping criterion of a user's own: the row ends with the first token whose id can be divided by 7 and 3."""

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns which rows end, bool [B]."""
        return input_ids[:, -1] % 21 == 0


def main() -> None:
    """Decodes what is missing, then counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="one file a batch")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument(
        "--drafters", nargs="*", default=[*DRAFTERS], help="what decodes; default: all"
    )
    parser.add_argument("--part", default="0/1", help="which of how many processes this is")
    parser.add_argument("--json", action="store_true", help="the last line is JSON always")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    prompts = read_prompts(options.prompts)[: options.limit]
    wanted = {name: DRAFTERS[name] for name in options.drafters}
    jobs = [
        *_batches(prompts, options.batch_size, wanted),
        *_varied(prompts, options.batch_size, wanted),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs[part::parts] if _missing(options.out, job)]
    if left:
        _decode(options, left)
    if not any(_missing(options.out, job) for job in jobs):
        print(json.dumps(_summary(options, [_found(options.out, job) for job in jobs])))


def _batches(
    prompts: list[Any], size: int, drafters: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    ordered = sorted(prompts, key=lambda prompt: len(prompt.text))
    for i in range(0, len(ordered), size):
        group = ordered[i : i + size]
        yield {
            "what": "plain",
            "names": [prompt.name for prompt in group],
            "texts": [prompt.text for prompt in group],
            "drafters": drafters,
        }


def _varied(
    prompts: list[Any], size: int, drafters: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    cheap = {name: own for name, own in drafters.items() if name in VARIED}
    for what in ("repetition_penalty", "bad_words", "min_length", "stop_strings", "criterion"):
        yield from ({**job, "what": what} for job in _batches(prompts[::EVERY], size, cheap))


def _file(folder: Path, job: Mapping[str, Any]) -> Path:
    return folder / f"{job['what']}-{job['names'][0]}.json"


def _found(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run found for a batch."""
    path = _file(folder, job)
    nothing = {"what": job["what"], "names": job["names"], "ended": 0, "same": {}, "forwards": {}}
    return json.loads(path.read_text("utf-8")) if path.is_file() else nothing


def _missing(folder: Path, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the drafters that a batch has not been decoded with, by name."""
    done = _found(folder, job)["same"]
    return {name: speculation for name, speculation in job["drafters"].items() if name not in done}


def _decode(options: argparse.Namespace, jobs: list[dict[str, Any]]) -> None:
    import torch

    from oval_adapters import attach
    from oval_adapters.load_model import load_model, load_tokenizer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, tokenizer = load_model(options.model, "float32"), load_tokenizer(options.model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with attach(model) as oval:
        for job in track(jobs, "batches", console=Console(stderr=True)):
            inputs = tokenizer.apply_chat_template(
                [[{"role": "user", "content": text}] for text in job["texts"]],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                padding=True,
            )
            found = _found(options.out, job)
            left = _missing(options.out, job)
            _compare(oval, dict(inputs), found, left, tokenizer, options.max_new_tokens)
            path = _file(options.out, job)
            path.with_suffix(".partial").write_text(json.dumps(found), encoding="utf-8")
            path.with_suffix(".partial").replace(path)


def _compare(
    oval: Attachment,
    inputs: dict[str, Any],
    found: dict[str, Any],
    drafters: Mapping[str, Mapping[str, Any]],
    tokenizer: Any,
    length: int,
) -> None:
    """Adds by drafter which texts are Hugging Face's."""
    import torch

    model, ids, mask = oval.model, inputs["input_ids"], inputs["attention_mask"]
    settings = {
        "do_sample": False,
        "max_new_tokens": length,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings |= _extras(found["what"], tokenizer)
    call = {"input_ids": ids, "attention_mask": mask, **settings}
    expected = model.generate(use_oval=False, **call)
    found["ended"] = int((expected[:, -1] == tokenizer.eos_token_id).sum())
    prompt = None
    if found["what"] == "plain":
        prompt = oval.new_cache(length)
        with torch.no_grad():
            places = (mask.cumsum(1) - 1).clamp(min=0)
            model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=places[:, :-1],
                  cache=prompt, use_cache=True, logits_to_keep=1)  # fmt: skip
    for name, speculation in drafters.items():
        extra = {} if prompt is None else {"cache": prompt.copy()}
        before = oval.counters.forwards
        text = model.generate(
            custom_generate=oval.speculative,
            speculation={**speculation, "turns_off": False},
            **extra,
            **call,
        )
        found["same"][name] = [_same(own, other) for own, other in zip(expected, text, strict=True)]
        found["forwards"][name] = oval.counters.forwards - before


def _same(expected: torch.Tensor, text: torch.Tensor) -> bool:
    return expected.tolist() == text.tolist()


def _extras(what: str, tokenizer: Any) -> dict[str, Any]:
    words = [tokenizer(word, add_special_tokens=False).input_ids for word in (" the", " and", "\n")]
    return {
        "plain": {},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "bad_words": {"bad_words_ids": words},
        "min_length": {"min_new_tokens": 60},
        "stop_strings": {"stop_strings": ["ing ", ". The", "\n\n"], "tokenizer": tokenizer},
        "criterion": {"stopping_criteria": [EndsOnSeven()]},
    }[what]


def _summary(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    identical: dict[str, Counter[str]] = {}
    decoded: dict[str, Counter[str]] = {}
    forwards: dict[str, Counter[str]] = {}
    parted: list[dict[str, str]] = []
    for row in rows:
        for drafter, same in row["same"].items():
            identical.setdefault(row["what"], Counter())[drafter] += sum(same)
            decoded.setdefault(row["what"], Counter())[drafter] += len(same)
            forwards.setdefault(row["what"], Counter())[drafter] += row["forwards"][drafter]
            parted += [
                {"what": row["what"], "drafter": drafter, "prompt": name}
                for name, is_same in zip(row["names"], same, strict=True)
                if not is_same
            ]
    return {
        "decoded": {what: dict(total) for what, total in decoded.items()},
        "identical": {what: dict(total) for what, total in identical.items()},
        "forwards": {what: dict(total) for what, total in forwards.items()},
        "parted": parted,
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "model": options.model,
        "dtype": "float32",
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()

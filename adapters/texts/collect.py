"""One door to all passages: kinds and files in, passages out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from oval_adapters.texts.chat import chat_passages
from oval_adapters.texts.facts import SPLITS, Split
from oval_adapters.texts.passage import Kind, Passage
from oval_adapters.texts.retrieval import retrieval_passages
from oval_adapters.texts.running_text import text_passages, tokenize
from oval_adapters.texts.source import read_source
from oval_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: tuple[Kind, ...] = get_args(Kind)


def passages(
    kinds: Sequence[str],
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    steps: int,
    count: int,
    seed: int,
    split: Split = "train",
    repeat: bool = False,
) -> list[Passage]:
    """Returns passages of each kind; every kind can be made from any file.

    Args:
        kinds: `text` (running text), `retrieval` (facts to look back for) and `chat` (dialogues).
        paths: a file or several: .txt, .jsonl (`text`; `question` and `answer`; `turns`; `ordered_kv_records`), or
            either with .gz. Each kind takes about as many passages from each file.
        tokenizer: the model's.
        context: tokens of each prompt, exactly.
        steps: tokens of each continuation, exactly.
        count: passages of each kind.
        seed: same seed, same passages.
        split: training and test have no retrieved fact in common; the texts are those of the files given.
        repeat: repeat a text that is too short.

    Raises:
        ConfigError: unknown kind, a file that cannot be read or is too short, or a context or count out of range.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    _check(kinds, files, {"context": context, "steps": steps, "count": count}, split)
    sources = [read_source(file) for file in files[:count]]
    texts = [tokenize(tokenizer, source.name, source.text) for source in sources]
    found: list[Passage] = []
    for kind in kinds:
        for i, (source, text) in enumerate(zip(sources, texts, strict=True)):
            share = len(range(i, count, len(sources)))
            sizes = {"context": context, "steps": steps, "count": share}
            match kind:
                case "text":
                    made = text_passages(text, tokenizer, seed=seed, repeat=repeat, **sizes)
                case "retrieval":
                    made = retrieval_passages(
                        text,
                        tokenizer,
                        records=source.records,
                        seed=seed + i,
                        split=split,
                        repeat=repeat,
                        **sizes,
                    )
                case _:
                    made = chat_passages(
                        text, source.dialogues, tokenizer, seed=seed, repeat=repeat, **sizes
                    )
            found += made if len(sources) == 1 else [_renamed(p, source.name) for p in made]
    return found


def _renamed(passage: Passage, file: str) -> Passage:
    return replace(passage, name=f"{passage.name} of {file}")


def _check(
    kinds: Sequence[str], files: list[str | Path], sizes: dict[str, int], split: str
) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"kinds: got {kind!r}; {did_you_mean(kind, KINDS)}")
    if split not in SPLITS:
        raise ConfigError(f"split: got {split!r}; {did_you_mean(split, SPLITS)}")
    if not kinds or not files:
        raise ConfigError("kinds, data: got none. Allowed: one or more of each. Give some.")
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}: got {size}. Allowed: 1 or more. Raise it.")

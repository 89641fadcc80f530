"""Prompts of the parity bench: chat, code, a long document, unequal batches. Written for it, free to use."""

from __future__ import annotations

from oval_adapters.bench.parity import ParityCase

__all__ = ["long_text", "parity_cases"]

CHAT = (
    "What is the capital of France? Then list three facts about it.",
    "Explain to a child why the sea is salty.",
    "Give me a recipe for lentil soup for two people, with quantities.",
    "Write a short letter to a neighbour who plays loud music at night.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers, and why?",
    "Plan a walk of three hours through an old town, with one stop to eat.",
    "Translate into German: The train leaves at seven and arrives before noon.",
    "Summarise in one sentence what a page table does in an operating system.",
)
CODE = (
    'def merge_sorted(a: list[int], b: list[int]) -> list[int]:\n    """Merges two sorted lists."""\n',
    "import csv\n\n\ndef read_prices(path):\n    # returns a dict from name to price\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "-- all customers without an order in the last year\nSELECT",
)
STORIES = (
    "The lighthouse had been dark for eleven years when",
    "Rain fell on the market square, and the baker",
    "In the year 1847 a clockmaker in Bern",
    "Two sisters found a map folded into the back of",
)

_CHAPTER = (
    "Day {day}. The survey party left camp {camp} at dawn and followed the river north. {name} carried the "
    "theodolite, and the measured height of the ridge was {height} metres. In the evening {name} wrote down "
    "that {count} of the {total} flasks were broken, that the wind had turned, and that the code on the crate "
    "by the tent was {code}. Nobody knew what it meant.\n\n"
)
_NAMES = ("Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta")


def long_text(num_chapters: int = 40) -> str:
    """Returns a diary whose every entry has facts of its own: about 90 tokens an entry."""
    return "".join(
        _CHAPTER.format(
            day=day,
            camp=day % 9 + 1,
            name=_NAMES[day * 5 % len(_NAMES)],
            height=1000 + day * 137 % 900,
            count=day * 3 % 11 + 1,
            total=day * 7 % 13 + 12,
            code=f"{day * 7919 % 10000:04d}",
        )
        for day in range(1, num_chapters + 1)
    )


def parity_cases(tokenizer: object, document: str) -> list[ParityCase]:
    """Returns the cases of the parity bench.

    Args:
        tokenizer: chat prompts go through its template, if it has one.
        document: long text, about 2k tokens.
    """
    chat = [_chat(tokenizer, text) for text in CHAT]
    cases = [ParityCase(name=f"chat {i}", texts=(text,)) for i, text in enumerate(chat)]
    cases += [ParityCase(name=f"code {i}", texts=(text,)) for i, text in enumerate(CODE)]
    cases += [ParityCase(name=f"story {i}", texts=(text,)) for i, text in enumerate(STORIES)]
    cases += [
        ParityCase(name="document", texts=(document,)),
        ParityCase(
            name="document, chunks", texts=(document,), options=(("prefill_chunk_size", 512),)
        ),
        ParityCase(name="batch of 4", texts=(chat[0], CODE[0], STORIES[0], chat[7])),
        ParityCase(
            name="batch of 4, chunks",
            texts=(CODE[1], STORIES[1], chat[2], CODE[3]),
            options=(("prefill_chunk_size", 16),),
        ),
        ParityCase(name="beams", texts=(STORIES[0],), options=(("num_beams", 4),)),
        ParityCase(name="beams, batch", texts=(chat[1], CODE[2]), options=(("num_beams", 3),)),
        ParityCase(
            name="sampling", texts=(STORIES[2],), options=(("do_sample", True), ("top_p", 0.9))
        ),
        ParityCase(
            name="sampling, batch",
            texts=(STORIES[3], chat[4]),
            options=(("do_sample", True), ("temperature", 0.7), ("num_return_sequences", 2)),
        ),
    ]
    return cases


def _chat(tokenizer: object, text: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return text
    message = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        message, tokenize=False, add_generation_prompt=True
    )
    return rendered

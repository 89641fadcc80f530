"""The demo's answer: speculative, with a small fast memory, and watched. Knows no page of HTML."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.attachment import Attachment, attach
from oval_adapters.demo.settings import Answer, DemoSettings, bundled, demo_file, says_the_same
from oval_adapters.distill.prompts import chat_prompt
from oval_adapters.evaluation.decode import PageWatch, StepClock, pad_id
from oval_adapters.evaluation.mm_model import Asker, load_processor
from oval_adapters.families import WRAPPERS
from oval_adapters.load_model import load_model, load_tokenizer
from oval_adapters.page_report.watching import WatchedReads, watch_reads
from oval_mm.pictures import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.page_report.report import ReadReport

__all__ = ["answer_about_picture", "answer_about_text", "seen_pictures"]

_DESCRIBE = "Describe the picture."
_ABOUT_NOTES = "What did the office order for the keeper of the lighthouse?"
_LAYER_GROUPS = 3
_PAGE_SIZE, _TILE = 8, 2  # fine, for the eye; a short text has many pages then


def answer_about_picture(settings: DemoSettings) -> Answer:
    """Asks the vision model about the picture."""
    processor = load_processor(settings.vision_model)
    model = load_model(settings.vision_model, settings.dtype, settings.device)
    facts = _known(settings)
    question = settings.question or facts.pop("question", _DESCRIBE)
    picture = read_picture(settings.picture or demo_file("picture.jpg"))
    with _attached(model, settings) as oval:
        prompt = Asker(oval, processor, max_new_tokens=1).prompt(question, 1)
        start = processor.tokenizer.bos_token
        inputs = processor(
            images=[picture],
            text=prompt,
            return_tensors="pt",
            add_special_tokens=not (start and prompt.startswith(start)),
        )
        pictures = seen_pictures(processor, inputs["pixel_values"]) or (picture,)
        inputs = inputs.to(model.device, model.dtype)
        told = _answer(oval, dict(inputs), processor.tokenizer, settings, pictures, question)
    expected = facts["expected"]
    is_right = None if expected is None else says_the_same(told.values["answer"], expected)
    return replace(told, values={**told.values, **facts, "is_right": is_right})


def answer_about_text(settings: DemoSettings) -> Answer:
    """Asks the text model about the notes that ship."""
    tokenizer = load_tokenizer(settings.text_model)
    model = load_model(settings.text_model, settings.dtype, settings.device)
    notes = demo_file("notes.txt").read_text(encoding="utf-8")
    text = settings.question or f"{notes}\nQuestion: {_ABOUT_NOTES}"
    ids = torch.tensor([chat_prompt(tokenizer, text)], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with _attached(model, settings) as oval:
        return _answer(oval, inputs, tokenizer, settings, (), settings.question or _ABOUT_NOTES)


def _known(settings: DemoSettings) -> dict[str, Any]:
    """Returns what the picture really shows, and the answer that is right; None where nobody knows."""
    if settings.picture is not None:
        return {"shows": None, "expected": None, "tried": None, "chosen_for": None}
    own = bundled()
    facts = {"shows": own.shows, "expected": None, "tried": own.tried, "chosen_for": own.chosen_for}
    if settings.question is None:
        facts |= {"question": own.question, "expected": own.answer}
    return facts


def seen_pictures(processor: Any, pixels: torch.Tensor) -> tuple[Image, ...]:
    """Returns what a vision tower got, as pictures; nothing where it got several parts of each.

    Args:
        processor: that made the pixels.
        pixels: [images, 3, H, W], normalised.
    """
    from PIL import Image as Images

    if pixels.ndim != 4:
        return ()
    images = processor.image_processor
    mean = torch.tensor(images.image_mean)[:, None, None]
    std = torch.tensor(images.image_std)[:, None, None]
    shown = ((pixels.float().cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    return tuple(Images.fromarray(own.permute(1, 2, 0).numpy()) for own in shown)


@contextlib.contextmanager
def _attached(model: PreTrainedModel, settings: DemoSettings) -> Iterator[Attachment]:
    """Attaches a model with a page file that ends with it."""
    with tempfile.TemporaryDirectory(prefix="oval-demo-") as folder:
        tiers = {"fast_tokens": settings.fast_tokens, "disk": folder}
        config = {"page_size": _PAGE_SIZE, "speculation": {"drafter": "auto"}, "tiers": tiers}
        if model.config.model_type in WRAPPERS:
            config["vision"] = {"tile": _TILE}
        with attach(model, config) as oval:
            yield oval


def _answer(
    oval: Attachment,
    inputs: dict[str, Any],
    tokenizer: Any,
    settings: DemoSettings,
    pictures: tuple[Image, ...],
    question: str,
) -> Answer:
    model, width = oval.model, inputs["input_ids"].shape[1]
    ways = {"do_sample": False, "max_new_tokens": settings.answer_tokens, "pad_token_id": pad_id(model)}  # fmt: skip
    ways |= {"num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    with watch_reads(oval, layer_groups=min(_LAYER_GROUPS, _layers(model))) as reads:
        pages = _AwayWatch(oval, reads.cache)
        begin = time.perf_counter()
        with StepClock(model, pages) as clock:
            out = model.generate(
                **inputs,
                **ways,
                cache=reads.cache,
                custom_generate=oval.speculative,
                streamer=clock,
            )
        seconds = time.perf_counter() - begin
        report = reads.report(out, tokenizer, prompt_columns=width)
        values = _values(oval, reads, pages, clock)
    text = tokenizer.decode(out[0, width:], skip_special_tokens=True).strip()
    facts = {
        "model": model.config.name_or_path.rsplit("/", 1)[-1],
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": oval.backend,
        "question": question,
        "answer": text,
        "tokens": len(report.tokens),
        "prompt_tokens": width,
        "seconds_of_answer": round(seconds, 3),
        "prompt_s": round(clock.prompt_s, 3),
        "image_share": _image_share(report) if pictures else None,
    }
    return Answer(values={**facts, **values}, report=report, pictures=pictures)


class _AwayWatch(PageWatch):
    """Also sees how many pages were in the slow tier only, at most, and of how many at that time.

    Args:
        oval: see `PageWatch`.
        cache: of the text, on tiers.
    """

    def __init__(self, oval: Attachment, cache: OvalCache) -> None:
        super().__init__(oval, cache)
        self._paged = cache.paged
        self.away, self.of = 0, 0

    def look(self, *, begins: bool = False) -> None:
        super().look(begins=begins)
        tiers = self._paged.tiers
        away = 0 if tiers is None else tiers.num_away
        if away >= self.away:
            self.away, self.of = away, len(self._paged.table.sequences[0].pages)


def _image_share(report: ReadReport) -> float:
    """Returns the share of attention that the picture got, as the drawn panel of the whole answer adds it up."""
    mass = report.mass.mean(0)
    return float(mass[[kind == "image" for kind in report.kinds]].sum())


def _values(
    oval: Attachment, reads: WatchedReads, pages: _AwayWatch, clock: StepClock
) -> dict[str, Any]:
    stats, own = oval.stats(), pages.to_dict()
    spec, moved = stats["speculation"], stats["tiers"]
    kinds = [page.kind for page in reads.cache.paged.table.sequences[0].pages]
    return {
        "drafter": spec["drafter"],
        "tau": spec["tau"],
        "arrivals": list(clock.arrivals),
        "acceptance_rate": spec["draft_acceptance_rate"],
        "text_pages": kinds.count("text"),
        "image_pages": kinds.count("image"),
        "fast_tokens": moved["fast_tokens"],
        "most_pages_away": pages.away,
        "pages_then": pages.of,
        "page_hit_rate": own["found"] / own["asked"] if own["asked"] else None,
        "bytes_prefetched": moved["bytes_prefetched"],
        "bytes_used": moved["bytes_used"],
        "bytes_demanded": moved["bytes_demanded"],
        "bytes_stored": moved["bytes_stored"],
        "bytes_loaded": moved["bytes_loaded"],
        "transfer_s": round(moved["transfer_s"], 4),
        "stall_s": round(moved["stall_s"], 4),
        "link": moved["link"],
    }


def _layers(model: Any) -> int:
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return count

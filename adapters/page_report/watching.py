"""Watches what a generation reads: a cache that logs, and the report on one row of it.

Shapes: B rows, L columns, T tokens of an answer, P pages, G groups of layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.families import decoder_family
from oval_adapters.page_report.read_log import ReadLog
from oval_adapters.page_report.reading_policies import LoggedFull, LoggedGuarded, LoggedRouted
from oval_adapters.page_report.report import ReadPage, ReadReport, ReadToken
from oval_adapters.routing.resolve import resolve_router
from oval_core.config import MAX_PAGE_SIZE
from oval_core.errors import ConfigError
from oval_core.policy import FullPolicy
from oval_core.routing.guarded import GuardedPolicy
from oval_mm.spans import ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache

__all__ = ["WatchedReads", "watch_reads"]


@contextlib.contextmanager
def watch_reads(
    oval: Attachment, *, layer_groups: int = 1, reserve_tokens: int = 0
) -> Iterator[WatchedReads]:
    """Gives a cache that remembers which pages every token read, and closes it at the end.

        with watch_reads(oval) as reads:
            out = model.generate(**inputs, cache=reads.cache, max_new_tokens=32)
            report = reads.report(out, tokenizer, prompt_columns=inputs["input_ids"].shape[1])

    What is computed stays the same, also with tiers, speculation and policies that select; each layer's scores are
    computed once more to be summed by page, never kept token by token.

    Args:
        oval: the model's attachment.
        layer_groups: shares are also told for so many groups of neighbouring layers.
        reserve_tokens: see `Attachment.new_cache`.
    Raises:
        ConfigError: more groups than layers.
    """
    cache = oval.new_cache(reserve_tokens)
    try:
        yield WatchedReads(oval, cache, layer_groups)
    finally:
        cache.close()


class WatchedReads:
    """A cache whose reads are logged. Made by `watch_reads`.

    Attributes:
        cache: to pass as `cache=` to `generate`.
    """

    def __init__(self, oval: Attachment, cache: OvalCache, layer_groups: int) -> None:
        if not 1 <= layer_groups <= cache.num_layers:
            raise ConfigError(
                f"layer_groups: got {layer_groups}. Allowed: 1..{cache.num_layers}, the model's layers. Choose such a number."
            )
        layers = torch.arange(cache.num_layers).tensor_split(layer_groups)
        self.cache, self._oval = cache, oval
        self._log = ReadLog([own.tolist() for own in layers])
        _, cutter = cache.paged.read_by(FullPolicy(), None)
        cache.paged.read_by(_logged(oval, self._log), cutter)

    def report(
        self,
        ids: torch.Tensor,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_columns: int,
        row: int = 0,
    ) -> ReadReport:
        """Returns what the tokens of one row's answer read, up to the first that ends a text.

        Args:
            ids: [B, L] that `generate` returned: prompt and answer.
            tokenizer: of the model.
            prompt_columns: columns of the prompt.
            row: of the batch.
        Raises:
            ConfigError: the cache holds another text, or drafts of the model itself replaced what watches.
        """
        own: list[int] = ids[row].tolist()
        answer = _until_end(own[prompt_columns:], self._ends())
        columns: list[int] = self.cache.stored_columns(row).tolist()
        self._check(answer, columns, prompt_columns)
        pages, spans = self._pages(own, columns, tokenizer, row)
        by_group = self._masses(pages, columns, range(prompt_columns - 1, prompt_columns - 1 + len(answer)), row)  # fmt: skip
        sizes = torch.tensor([len(layers) for layers in self._log.groups], dtype=torch.float32)
        mass = (by_group * (sizes / sizes.sum())[:, None, None]).sum(0)
        texts = _pieces(tokenizer, answer)
        tokens = (
            ReadToken(token_id=token, text=text, column=prompt_columns + place)
            for place, (token, text) in enumerate(zip(answer, texts, strict=True))
        )
        return ReadReport(
            tokens=tuple(tokens),
            pages=tuple(pages),
            spans=spans,
            mass=mass,
            by_group=by_group,
            groups=self._log.groups,
        )

    def _ends(self) -> set[int]:
        end = self._oval.model.generation_config.eos_token_id
        return set() if end is None else set(end if isinstance(end, list) else [end])

    def _check(self, answer: Sequence[int], columns: Sequence[int], prompt_columns: int) -> None:
        last = (
            prompt_columns + len(answer) - 2
        )  # its query chose the last token, which is not cached
        if not answer or last > max(columns, default=-1):
            raise ConfigError(
                f"report: got {len(answer)} tokens of an answer behind {prompt_columns} columns, and {len(columns)} cached "
                "tokens. Allowed: what `generate` returned for this cache. Pass its output and `cache=reads.cache`."
            )

    def _pages(
        self, ids: Sequence[int], columns: Sequence[int], tokenizer: Any, row: int
    ) -> tuple[list[ReadPage], tuple[ImageSpan, ...]]:
        spans = _spans(self.cache, row, columns)
        pages = []
        for page in self.cache.paged.table.sequences[row].pages:
            own = tuple(columns[token] for token in page.tokens)
            if page.kind == "text":
                text = tokenizer.decode([ids[c] for c in own if c < len(ids)])
                pages.append(ReadPage(page_id=page.page_id, kind="text", columns=own, text=text))
                continue
            index, span = next((i, s) for i, s in enumerate(spans) if 0 <= own[0] - s.start < s.length)  # fmt: skip
            places = tuple(column - span.start for column in own)
            pages.append(ReadPage(page_id=page.page_id, kind="image", columns=own, span=index, places=places))  # fmt: skip
        return sorted(pages, key=lambda page: page.columns[0]), spans

    def _masses(
        self, pages: Sequence[ReadPage], columns: Sequence[int], asking: Sequence[int], row: int
    ) -> torch.Tensor:
        """Returns [G, T, P] what the tokens in the columns `asking` read."""
        place_of = {column: place for place, column in enumerate(columns)}
        index_of = {page.page_id: index for index, page in enumerate(pages)}
        by_group = torch.zeros(len(self._log.groups), len(asking), len(pages))
        for t, column in enumerate(asking):
            read = self._log.read(row, place_of[column]) if column in place_of else None
            if read is None or not index_of.keys() >= set(read.page_ids):
                what = "nobody watched" if read is None else "pages that are gone"
                raise ConfigError(
                    f"report: got a token whose reads are lost ({what}). Allowed: right after `generate` on a new cache of "
                    "`watch_reads`, with any drafter but `self`. Generate again on such a cache."
                )
            index = torch.tensor([index_of[page_id] for page_id in read.page_ids])
            by_group[:, t].index_add_(1, index, read.mass)
        return by_group


def _logged(oval: Attachment, log: ReadLog) -> LoggedFull | LoggedRouted:
    config, model = oval.config, oval.model
    if config.routing is None:
        return LoggedFull(log)
    text = model.config.get_text_config(decoder=True)
    windows = decoder_family(model.config).windows(text)
    router = resolve_router(config.routing, model)
    most = config.page_size if config.routing.sizing == "fixed" else MAX_PAGE_SIZE
    if config.vision is not None:
        most = max(most, config.vision.page_tokens)
    kind = LoggedGuarded if config.policy == GuardedPolicy.name else LoggedRouted
    return kind(log, config.routing, windows, router, oval.counters.routing, most)


def _spans(cache: OvalCache, row: int, columns: Sequence[int]) -> tuple[ImageSpan, ...]:
    """Returns the images of a row, by column, also where some of their tokens are unread."""
    routed = cache.image_views.row(row)
    if not routed:
        return tuple(
            ImageSpan(columns[own.span.start], own.span.length, own.span.image, own.span.grid)
            for own in cache.images[row]
        )
    spans: list[ImageSpan] = []
    number, before = -1, None
    for placed in routed:
        number += before is None or placed.view.image is not before.image
        before = placed.view
        spans.append(ImageSpan(placed.column, placed.length, number, placed.view.grid))
    return tuple(spans)


def _until_end(answer: Sequence[int], ends: set[int]) -> list[int]:
    for place, token in enumerate(answer):
        if token in ends:
            return list(answer[: place + 1])
    return list(answer)


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns what each token adds to the text; a letter of several tokens comes with the last of them."""
    pieces, done = [], ""
    for place in range(len(ids)):
        text = tokenizer.decode(ids[: place + 1])
        is_whole = not text.endswith("\ufffd") or place == len(ids) - 1
        pieces.append(text[len(done) :] if is_whole and text.startswith(done) else "")
        done = done + pieces[-1]
    return pieces

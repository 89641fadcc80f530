"""The rows that one call writes: text, scores and ends of each, in Hugging Face's columns. Knows no tree, no model.

Shapes: B rows, L columns so far, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer, StoppingCriteriaList

__all__ = ["Rows"]


class Rows:
    """Texts that grow token by token, each at its own pace, and end where plain decoding would end them.

    Without an end token (`pad` is None) plain decoding goes on with rows that a criterion has ended until all have:
    these rows are asked for more as long as another one is longer.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        criteria: StoppingCriteriaList,
        pad: int | None,
        streamer: BaseStreamer | None,
        *,
        keeps_scores: bool = False,
        keeps_logits: bool = False,
    ) -> None:
        """Takes the prompts.

        Args:
            input_ids: [B, L], padded on the left.
            mask: [B, L], 0 where there is padding; None for none.
            criteria: asked after each token of a row, with [1, L] ids.
            pad: fills rows that have ended; None where nothing does.
            streamer: gets each column of tokens [B] once all rows have it.
            keeps_scores: whether the scores of each token are wanted.
            keeps_logits: whether the logits are.
        """
        self.num_rows, self.prompt_columns = input_ids.shape
        self._criteria, self._pad, self._streamer = criteria, pad, streamer
        self._max_length = criteria.max_length
        spare = 64 if self._max_length is None else max(1, self._max_length - self.prompt_columns)
        self._ids = torch.cat([input_ids, input_ids.new_zeros(self.num_rows, spare)], dim=1)
        self.texts = _without_padding(input_ids, mask)
        self._new: list[list[int]] = [[] for _ in range(self.num_rows)]
        self._ended = [False] * self.num_rows
        self._num_streamed = 0
        self._scores: list[list[torch.Tensor]] | None = (
            [[] for _ in range(self.num_rows)] if keeps_scores else None
        )
        self._logits: list[list[torch.Tensor]] | None = (
            [[] for _ in range(self.num_rows)] if keeps_logits else None
        )

    @property
    def num_columns(self) -> int:
        """New columns: tokens of the row that has most."""
        return max(len(new) for new in self._new)

    def num_new(self, row: int) -> int:
        """Tokens that a row has emitted."""
        return len(self._new[row])

    def wanted(self, row: int) -> int | None:
        """Returns how many more tokens a row may emit; None for no limit, 0 where it has all."""
        if self._ended[row]:
            return 0 if self._pad is not None else self.num_columns - len(self._new[row])
        if self._max_length is None:
            return None
        return max(1, self._max_length - self.prompt_columns - len(self._new[row]))

    def ids(self, row: int, path: tuple[int, ...] = ()) -> torch.Tensor:
        """Returns the ids [1, L] that plain decoding would have after these further tokens."""
        ids = self._ids[row : row + 1, : self.prompt_columns + len(self._new[row])]
        return torch.cat([ids, ids.new_tensor([path])], dim=1) if path else ids

    def emit(
        self,
        row: int,
        token: int,
        scores: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> bool:
        """Appends a token to a row, with what it was chosen by, [V] each; returns whether the row ends here."""
        new = self._new[row]
        column = self.prompt_columns + len(new)
        if column == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids[row, column] = token
        new.append(token)
        self.texts[row].append(token)
        if self._logits is not None and logits is not None:
            self._logits[row].append(logits)
        shown = None
        if self._scores is not None and scores is not None:
            self._scores[row].append(scores)
            shown = tuple(score[None] for score in self._scores[row])
        if self._ended[row]:
            return self.wanted(row) == 0
        self._ended[row] = bool(torch.as_tensor(self._criteria(self.ids(row), shown)).any())
        return self._ended[row]

    def stream(self) -> None:
        """Hands on the columns that all rows have by now."""
        if self._streamer is None:
            return
        ready = min(
            self.num_columns if ended and self._pad is not None else len(new)
            for new, ended in zip(self._new, self._ended, strict=True)
        )
        for column in range(self._num_streamed, ready):
            tokens = [new[column] if column < len(new) else self._pad for new in self._new]
            self._streamer.put(torch.tensor(tokens))
        self._num_streamed = max(self._num_streamed, ready)

    def end_stream(self) -> None:
        """Tells the streamer that all is there."""
        if self._streamer is not None:
            self._streamer.end()

    def sequences(self) -> torch.Tensor:
        """Returns all ids [B, L], ended rows padded on the right."""
        total = self.prompt_columns + self.num_columns
        ids = self._ids[:, :total].clone()
        for row, new in enumerate(self._new):
            if self._pad is not None:
                ids[row, self.prompt_columns + len(new) :] = self._pad
        return ids

    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """Returns the processed scores [B, V] of each new column; zeros in rows that had ended. None unless kept."""
        return _by_column(self._scores)

    def logits(self) -> tuple[torch.Tensor, ...] | None:
        """Returns the logits [B, V] of each new column, as `scores` does."""
        return _by_column(self._logits)


def _without_padding(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    if mask is None:
        rows: list[list[int]] = ids.tolist()
        return rows
    kept = mask[:, mask.shape[1] - ids.shape[1] :].bool().to(ids.device)
    return [row[real].tolist() for row, real in zip(ids, kept, strict=True)]


def _by_column(rows: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
    if rows is None:
        return None
    nothing = torch.zeros_like(rows[0][0])
    count = max(len(row) for row in rows)
    return tuple(
        torch.stack([row[i] if i < len(row) else nothing for row in rows]) for i in range(count)
    )

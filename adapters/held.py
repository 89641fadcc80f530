"""A forward that does not count until its tokens are accepted: what each row brings to it, and whether it has run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_core.errors import CacheMismatchError, FastMemoryError

__all__ = ["Held", "Tree"]

Tree = torch.Tensor | int
"""New tokens of a row: bool [N, N] which of them each one sees, or the number of those of a chain."""


class Held:
    """One held forward, from `OvalCache.hold` to `accept` or `abort`."""

    def __init__(self, trees: Sequence[Tree], rows: int, most: int | None) -> None:
        """Checks what is to come.

        Args:
            trees: by row.
            rows: of the cache.
            most: tokens that a row may bring; None for any number.
        Raises:
            CacheMismatchError: not one tree a row, or something that is no tree.
            FastMemoryError: a tree is too large for fast memory.
        """
        if len(trees) != rows:
            raise CacheMismatchError(
                f"hold: got {len(trees)} trees. Allowed: {rows}, one for each row of this cache. Pass 0 for a row that "
                "brings nothing."
            )
        self.trees = [_checked(row, tree) for row, tree in enumerate(trees)]
        self.counts = [tree if isinstance(tree, int) else len(tree) for tree in self.trees]
        if not any(self.counts):
            raise CacheMismatchError(
                "hold: got no new token in any row. Allowed: one at least. Leave the forward out."
            )
        if most is not None and max(self.counts) > most:
            raise FastMemoryError(
                f"hold: got a tree of {max(self.counts)} tokens. Allowed: {most} a row, what fast memory takes at once "
                "(max_new_tokens). Pass a smaller tree, or raise tiers.fast_tokens."
            )
        self.has_run = False
        self.hidden: torch.Tensor | None = None

    def ran(self, hidden: torch.Tensor | None) -> None:
        """Notes that the forward has run, and its last hidden states [B, T, C] if they are to be kept."""
        self.has_run, self.hidden = True, hidden

    def check_may(self, what: str) -> None:
        """Raises `CacheMismatchError` unless the forward itself is what comes now."""
        if what == "forward" and not self.has_run:
            return
        raise CacheMismatchError(
            f"{what}: got it while a forward is held on this cache. Allowed: accept(places) or abort() after the held "
            "forward. Call one of them first."
        )

    def check_forward(
        self, attention_mask: torch.Tensor | None, batch_size: int, num_queries: int
    ) -> list[Tree]:
        """Returns the trees; raises `CacheMismatchError` where the forward is not as announced."""
        if attention_mask is not None:
            raise CacheMismatchError(
                "attention_mask: got one in a held forward. Allowed: none, the trees say what is seen. Leave it out."
            )
        if batch_size != len(self.trees) or num_queries < max(self.counts):
            raise CacheMismatchError(
                f"held forward: got [{batch_size}, {num_queries}] new tokens. Allowed: {len(self.trees)} rows of at "
                f"least {max(self.counts)} tokens, as told to hold(). Pass them, padded on the right."
            )
        return self.trees

    def check_places(self, places: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the places to accept, or raises `CacheMismatchError`."""
        kept = [[int(place) for place in own] for own in places]
        fits = len(kept) == len(self.counts) and all(
            own == sorted(set(own)) and (not own or (own[0] >= 0 and own[-1] < count))
            for own, count in zip(kept, self.counts, strict=False)
        )
        if not fits:
            raise CacheMismatchError(
                f"accept: got places {kept}. Allowed: for each row, ascending, below {self.counts}. Pass such places."
            )
        return kept


def _checked(row: int, tree: Tree) -> Tree:
    if isinstance(tree, torch.Tensor):
        is_square = tree.ndim == 2 and tree.shape[0] == tree.shape[1]
        if is_square and tree.dtype == torch.bool and bool(tree.diagonal().all()):
            return tree
        got = f"a tensor {list(tree.shape)}, {tree.dtype}"
    elif isinstance(tree, int) and not isinstance(tree, bool) and tree >= 0:
        return tree
    else:
        got = repr(tree)
    raise CacheMismatchError(
        f"hold: got {got} for row {row}. Allowed: bool [N, N] where each token sees itself, or a number of tokens. "
        "Pass a tree, or the length of a chain."
    )

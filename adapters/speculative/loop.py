"""The steps of one speculative call: draft, verify in one forward, keep what counts. B rows, T nodes, V vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative.pace import Pace, Taken
from oval_adapters.speculative.rows import Rows
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation import LogitsProcessorList

    from oval_adapters.speculative.page_fusion import PageFusion
    from oval_adapters.speculative.prompt import ReadPrompt
    from oval_spec.verifier import Verifier

__all__ = ["NodeLimits", "SpeculativeRun"]

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """How far a tree may reach, whoever drafted it.

    Attributes:
        nodes: most nodes that a forward may bring for a row; None for no limit.
        positions: positions of the model: more than one node must all fit into them. None for no limit.
        kept_columns: columns of text above which the model drops its cache and scales positions anew; no node may lie
            beyond, since it would change them all. None for no limit.
        tokens: ids that the model can read; None leaves it to the model.
    """

    nodes: int | None = None
    positions: int | None = None
    kept_columns: int | None = None
    tokens: int | None = None


class SpeculativeRun:
    """Decodes the rows of one call, a few tokens a forward. The prompt is cached, the first tokens are emitted."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: OvalCache,
        rows: Rows,
        processors: Sequence[LogitsProcessorList],
        verifier: Verifier,
        pace: Pace,
        limits: NodeLimits,
        prompt: ReadPrompt,
        fusion: PageFusion | None = None,
    ) -> None:
        """Begins after the prompt.

        Args:
            model: the attached model.
            cache: holds the prompt.
            rows: what is emitted.
            processors: of the logits, by row.
            verifier: decides what of a tree counts.
            pace: chooses each step's drafter and number of nodes.
            limits: of trees.
            prompt: what it gave.
            fusion: fetches pages before each verification; None for none.
        """
        self._model, self._cache, self._rows = model, cache, rows
        self._processors, self._verifier, self._pace = processors, verifier, pace
        self._limits, self._inputs, self._fusion = limits, prompt.inputs, fusion
        self._positions, self._hidden = list(prompt.positions), prompt.hidden

    def finish(self) -> None:
        """Runs until every row has all its tokens."""
        self._rows.stream()
        while running := [row for row in range(self._rows.num_rows) if self._rows.wanted(row) != 0]:
            self._step(running)
        self._rows.end_stream()

    def _step(self, running: Sequence[int]) -> None:
        self._check_length()
        step = self._pace.begin()
        requests = [self._request(row, step.max_nodes) for row in running]
        drafts = step.draft(requests)
        _check_drafts(requests, drafts, self._limits.tokens)
        width = self._pace.width(step, drafts)
        trees = {
            request.row: draft.tree.cut(request.max_depth, min(request.max_nodes, width))
            for request, draft in zip(requests, drafts, strict=True)
        }
        if self._fusion is not None:
            by_row = dict(zip(running, drafts, strict=True))
            self._fusion.prepare([by_row.get(row) for row in range(self._rows.num_rows)])
        try:
            logits = self._forward(trees)
            kept, taken = {}, []
            for row, tree in trees.items():
                nodes, count = self._accept(row, tree, logits[row])
                kept[row] = nodes[:count]
                taken.append(Taken(len(tree), len(nodes), count))
            self._cache.accept([kept.get(row, ()) for row in range(self._rows.num_rows)])
        except BaseException:
            self._cache.abort()
            raise
        for row, nodes in kept.items():
            self._positions[row] += len(nodes)
        self._remember(kept)
        self._pace.end(step, taken)
        self._rows.stream()

    def _check_length(self) -> None:
        limit = self._limits.kept_columns
        columns = self._rows.prompt_columns + self._rows.num_columns
        if limit is not None and columns > limit:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} throws its cache away where a text outgrows {limit} tokens "
                f"(original_max_position_embeddings): got {columns}. Allowed with OVAL: up to {limit}. Shorten the text, or "
                "pass use_oval=False."
            )

    def _request(self, row: int, nodes: int) -> DraftRequest:
        wanted, next_position = self._rows.wanted(row), self._positions[row]
        depth = _NO_LIMIT if wanted is None else wanted - 1
        if self._limits.nodes is not None:
            nodes = min(nodes, self._limits.nodes)
        if self._limits.positions is not None:
            nodes = min(nodes, self._limits.positions - next_position)
        if self._limits.kept_columns is not None:
            depth = min(depth, self._limits.kept_columns - 1 - next_position)
        nodes = max(1, nodes)
        return DraftRequest(
            row=row,
            ids=self._rows.texts[row],
            hidden=None if self._hidden is None else self._hidden[row],
            max_depth=max(0, min(depth, nodes - 1)),
            max_nodes=nodes,
        )

    def _forward(self, trees: Mapping[int, TokenTree]) -> torch.Tensor:
        """Runs the model over all nodes of all trees; returns logits [B, T, V], held until they count."""
        count = range(self._rows.num_rows)
        width = max(len(tree) for tree in trees.values())
        ids, positions = [[0] * width for _ in count], [[0] * width for _ in count]
        for row, tree in trees.items():
            ids[row][: len(tree)] = tree.tokens
            positions[row][: len(tree)] = [self._positions[row] + depth for depth in tree.depths]
        device = self._model.device
        inputs = self._model.prepare_inputs_for_generation(
            torch.tensor(ids, device=device),
            position_ids=torch.tensor(positions, device=device),
            cache=self._cache,
            is_first_iteration=False,
            **self._inputs,
        )
        self._cache.hold([_held(trees.get(row)) for row in count])
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        return logits

    def _accept(
        self, row: int, tree: TokenTree, logits: torch.Tensor
    ) -> tuple[tuple[int, ...], int]:
        """Emits what the verifier takes of a tree; returns its nodes, and how many tokens there were up to the row's end.

        Each node but the root is a token, and one more follows, so that the cache is to hold as many of the nodes: the
        last token is not cached.
        """
        scored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        scores_of = self._scorer(row, tree, logits, scored)
        result = self._verifier.accept(tree, scores_of)
        tokens = [tree.tokens[node] for node in result.nodes[1:]] + [result.next_token]
        for count, (node, token) in enumerate(zip(result.nodes, tokens, strict=True), 1):
            scores = scores_of(node)
            if self._rows.emit(row, token, scores, scored[node][0]):
                return result.nodes, count
        return result.nodes, len(tokens)

    def _scorer(
        self,
        row: int,
        tree: TokenTree,
        logits: torch.Tensor,
        scored: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[int], torch.Tensor]:
        processors = self._processors[row]

        def scores_of(node: int) -> torch.Tensor:
            if node not in scored:
                raw = logits[node].to(copy=True, dtype=torch.float32)
                scores = raw
                if processors:
                    path = tuple(tree.tokens[n] for n in tree.path(node)[1:])
                    scores = processors(self._rows.ids(row, path), raw[None])[0]
                scored[node] = raw, scores
            return scored[node][1]

        return scores_of

    def _remember(self, kept: Mapping[int, Sequence[int]]) -> None:
        if self._hidden is None:
            return
        states, self._hidden = self._cache.last_hidden, self._hidden.clone()
        for row, nodes in kept.items():
            self._hidden[row] = states[row, nodes[-1]]


def _check_drafts(requests: Sequence[DraftRequest], drafts: object, tokens: int | None) -> None:
    """Raises `ConfigError` for drafts that would change the text, or that the model cannot read: a drafter may be anybody's."""
    right = isinstance(drafts, Sequence) and all(isinstance(draft, Draft) for draft in drafts)
    if not right or len(drafts) != len(requests):
        got = [type(d).__name__ for d in drafts] if isinstance(drafts, Sequence) else drafts
        raise ConfigError(
            f"oval_drafter: got {got!r} for {len(requests)} requests. Allowed: one Draft for each, in order. Correct the "
            "drafter."
        )
    for request, draft in zip(requests, drafts, strict=True):
        tree = draft.tree
        if tree.tokens[0] != request.ids[-1]:
            raise ConfigError(
                f"oval_drafter: got a tree with root {tree.tokens[0]} for row {request.row}. Allowed: {request.ids[-1]}, the "
                "last token of its text, which is not cached yet. Correct the drafter."
            )
        told = draft.chances
        if told is not None and not (len(told) == len(tree) and all(0 <= p <= 1 for p in told)):
            raise ConfigError(
                f"oval_drafter: got chances {told} for a tree of {len(tree)} nodes. Allowed: a probability for each, or None. "
                "Correct the drafter."
            )
        if tokens is not None and not 0 <= min(tree.tokens) <= max(tree.tokens) < tokens:
            raise ConfigError(
                f"oval_drafter: got tokens {min(tree.tokens)}..{max(tree.tokens)} for row {request.row}. Allowed: "
                f"0..{tokens - 1}, what the model can read. Correct the drafter."
            )


def _held(tree: TokenTree | None) -> torch.Tensor | int:
    """Returns what a row brings: a chain by its length, a tree by what its nodes see."""
    if tree is None:
        return 0
    return len(tree) if tree.is_chain else _visible(tree.parents)


@functools.lru_cache(maxsize=256)
def _visible(parents: tuple[int, ...]) -> torch.Tensor:
    return TokenTree(tuple(range(len(parents))), parents).visible()

"""Drafts by a smaller model of the same tokenizer: a greedy chain, and one more token beside the first where nodes are left.

Shapes: B rows, T tokens that a row is behind, W columns of the cache, K KV heads, D head dim, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from oval_adapters.load_model import load_model, load_tokenizer
from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DraftModelDrafter", "check_tokenizers", "load_draft_model"]

_PROBE = "OVAL reads 3 pages: naïve café, 東京, x_i += 0.5;\n\tthen  stops.  "
"""Words, digits, accents, other scripts, code and runs of spaces: what tokenizers split differently."""

_SPECIAL = ("bos_token_id", "eos_token_id", "unk_token_id")


class DraftModelDrafter:
    """Drafts with a causal language model of its own, that follows each row's text by the longest common prefix."""

    name = "draft"
    needs_hidden = False

    def __init__(self, model: PreTrainedModel, depth: int, vocab_size: int | None = None) -> None:
        """Makes a drafter without rows.

        Args:
            model: proposes tokens; the target itself may stand here, attached or not.
            depth: tokens in a row.
            vocab_size: tokens of the target; later rows of the model's LM head are padding. None takes them all.
        """
        self._model, self._depth = model, depth
        self._vocab_size = vocab_size
        self._text_config = model.config.get_text_config(decoder=True)
        self._limit = getattr(self._text_config, "max_position_embeddings", None)
        self._head = model.get_output_embeddings()
        self.reset()

    def reset(self) -> None:
        """Forgets every row."""
        # without a config: window layers keep all columns too, so that rejected tokens can be taken back
        self._cache = DynamicCache()
        self._rows: list[int] = []
        self._cached: list[list[int]] = []

    @torch.no_grad()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each request, in order, cut to its depth and nodes."""
        depths = [self._depth_of(request) for request in requests]
        if not any(depths):
            return [Draft(TokenTree.chain(request.ids[-1:])) for request in requests]
        ids, mask = self._align(requests)
        proposed: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        seconds = None
        for step in range(max(depths)):
            hidden = self._forward(ids, mask)
            logits = self._head(hidden)[:, : self._vocab_size]
            best = logits.topk(2, dim=-1).indices if step == 0 else logits.argmax(-1, keepdim=True)
            seconds = best[:, 1].tolist() if step == 0 else seconds
            ids = best[:, :1]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            proposed.append(ids[:, 0])
            states.append(hidden)
        chains, found = torch.stack(proposed, 1).tolist(), torch.stack(states, 1)
        for own, chain in zip(self._cached, chains, strict=True):
            own += chain[:-1]  # the last one was never fed
        assert seconds is not None, "at least one step"
        return [
            Draft(_tree(request, chain[:depth], second), found[row, :depth], in_target_space=False)
            for row, (request, chain, depth, second) in enumerate(
                zip(requests, chains, depths, seconds, strict=True)
            )
        ]

    def _depth_of(self, request: DraftRequest) -> int:
        depth = min(self._depth, request.max_depth, request.max_nodes - 1)
        if self._limit is not None:  # the target may have more positions than this model
            depth = min(depth, self._limit - len(request.ids) + 1)
        return max(0, depth)

    def _align(self, requests: Sequence[DraftRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cuts the cache to what every text still agrees with.

        All rows are taken to be equally far behind, so that they end at the same column and no hole is left between
        columns: a row that is less far behind reads a few tokens again.

        Returns:
            tokens to read [B, T], and the mask [B, W + T] of the columns that hold a token.
        """
        self._select([request.row for request in requests])
        lengths = [len(request.ids) for request in requests]
        common = [
            min(_common_prefix(own, request.ids), length - 1)
            for own, request, length in zip(self._cached, requests, lengths, strict=True)
        ]
        behind = max(n - known for n, known in zip(lengths, common, strict=True))
        kept = [max(0, n - behind) for n in lengths]
        self._crop(kept)
        self._cached = [list(request.ids) for request in requests]
        width, device = max(lengths), self._model.device
        ids = torch.zeros(len(lengths), width, dtype=torch.long)
        mask = torch.zeros(len(lengths), width, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - lengths[row] :] = torch.tensor(request.ids)
            mask[row, width - lengths[row] :] = 1
        return ids[:, width - behind :].to(device), mask.to(device)

    def _select(self, rows: Sequence[int]) -> None:
        """Makes the batch these rows: those that ended leave, and with a new one all begin again."""
        if list(rows) == self._rows:
            return
        if set(rows) <= set(self._rows):
            places = [self._rows.index(row) for row in rows]
            self._cached = [self._cached[place] for place in places]
            self._take_columns(lambda held: held[places])
        else:
            self.reset()
            self._cached = [[] for _ in rows]
        self._rows = list(rows)

    def _crop(self, kept: Sequence[int]) -> None:
        """Keeps the first tokens of each row, so many, with the last ones in the last column."""
        width = self._cache.get_seq_length()
        if not width:
            return
        firsts = [width - len(own) for own in self._cached]  # column of each row's first token
        new_width = max(kept)
        starts = [first + n - new_width for first, n in zip(firsts, kept, strict=True)]
        if not new_width:
            self._cache = DynamicCache()
        elif min(starts) == max(starts) >= 0:
            begin = starts[0]
            self._take_columns(lambda held: held[:, :, begin : begin + new_width])
        else:
            columns = torch.tensor(starts)[:, None] + torch.arange(new_width)
            columns = columns.clamp(min=0).to(self._model.device)  # of padding: any column does

            def gather(held: torch.Tensor) -> torch.Tensor:
                index = columns[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
                return held.gather(2, index)

            self._take_columns(gather)

    def _take_columns(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies a change to keys and values [B, K, W, D] of every layer."""
        for layer in self._cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns last hidden states [B, C] after ids [B, T]."""
        # A row that has no position left is fed along with the others; what it gets is cut off.
        last = None if self._limit is None else self._limit - 1
        places = (mask.cumsum(1) - 1).clamp(min=0, max=last)[:, -ids.shape[1] :]
        output = self._model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            cache=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[:, -1]
        return hidden


def load_draft_model(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    depth: int,
    dtype: str | None = None,
    device: str | None = None,
) -> DraftModelDrafter:
    """Loads a model that drafts for `target`, and checks that both mean the same by their tokens.

    Args:
        name: an embedded model, a folder or a hub id.
        target: the model that verifies.
        tokenizer: the target's; None compares the sizes of the vocabularies only.
        depth: tokens in a row.
        dtype: see `load_model`; None takes the target's.
        device: see `load_model`; None takes the target's.
    Raises:
        ConfigError: another vocabulary or another tokenizer.
        OvalError: it cannot be loaded.
    """
    if tokenizer is not None:
        check_tokenizers(tokenizer, load_tokenizer(name), name)
    model = load_model(
        name, dtype or str(target.dtype).removeprefix("torch."), device or target.device.type
    )
    sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (target, model)]
    if tokenizer is None and sizes[0] != sizes[1]:
        raise ConfigError(
            f"draft_model: got {name!r} with {sizes[1]} tokens, and the target has {sizes[0]}. Allowed: a model with the "
            "target's tokenizer. Choose one, or pass tokenizer= where the sizes differ by padding alone."
        )
    return DraftModelDrafter(model, depth, min(sizes))


def check_tokenizers(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str
) -> None:
    """Checks that a draft model's token ids mean what the target's mean.

    Raises:
        ConfigError: they do not; names the first difference.
    """
    found = _difference(target, draft)
    if found is not None:
        raise ConfigError(
            f"draft_model: got {name!r}, whose tokenizer is not the target's: {found}. Allowed: a model of the same "
            "tokenizer, such as a smaller one of its family. Choose one, or drafter 'ngram'."
        )


def _difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if len(ours) != len(theirs):
        return f"{len(theirs)} tokens against {len(ours)}"
    by_number = sorted(ours, key=ours.__getitem__)  # the same difference is told each time
    token = next((t for t in by_number if theirs.get(t) != ours[t]), None)
    if token is not None:
        return f"token {token!r} is {theirs.get(token)} against {ours[token]}"
    for special in _SPECIAL:
        pair = _special(draft, special), _special(target, special)
        if pair[0] != pair[1]:
            return f"{special} is {pair[0]} against {pair[1]}"
    split, wanted = (t(_PROBE, add_special_tokens=False).input_ids for t in (draft, target))
    if split != wanted:
        return f"a probe text gives {split} against {wanted}"
    return None


def _special(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    number: int | None = getattr(tokenizer, name, None)
    return number


def _tree(request: DraftRequest, chain: Sequence[int], second: int) -> TokenTree:
    """Returns the chain after the root, and the runner-up of its first token where a node is left."""
    tokens = [request.ids[-1], *chain]
    parents = list(range(-1, len(chain)))
    if chain and len(tokens) < request.max_nodes:
        tokens.append(second)
        parents.append(0)
    return TokenTree(tuple(tokens), tuple(parents))


def _common_prefix(cached: Sequence[int], ids: Sequence[int]) -> int:
    shorter = min(len(cached), len(ids))
    if list(cached[:shorter]) == list(ids[:shorter]):
        return shorter
    return next(i for i in range(shorter) if cached[i] != ids[i])

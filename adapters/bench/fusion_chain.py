"""Greedy decoding by chains of drafts, one text: what benchmarks of drafts and of page fusion run. Prints nothing.

Shapes: T tokens of a forward, S states, C hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_core.metrics import StepMetrics
from oval_spec.drafter import Draft, Drafter, DraftRequest
from oval_spec.token_tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.hf_cache import OvalCache

__all__ = ["ChainRun", "ChainStep", "Replay", "decode_chains", "prefill"]

OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One draft and its verification.

    Attributes:
        draft: a chain, cut to what counted.
        accepted: drafted tokens that were right.
        draft_s: seconds of drafting.
        verify_s: seconds of the forward.
        moved: what the forward moved between tiers; None without tiers.
    """

    draft: Draft
    accepted: int
    draft_s: float
    verify_s: float
    moved: StepMetrics | None


@dataclass(frozen=True, slots=True)
class ChainRun:
    """What was decoded, and how; `tokens` begins with the one that the prompt gave."""

    tokens: tuple[int, ...]
    steps: tuple[ChainStep, ...]


class Replay:
    """Drafts again what was drafted in another run of the same text, and takes as long."""

    name = "replay"
    needs_hidden = False

    def __init__(self, steps: Sequence[ChainStep]) -> None:
        self._steps = list(steps)

    def reset(self) -> None:
        """Does nothing: a replay serves one run."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns the next recorded draft, or a root alone where the text took another way or the record ended."""
        root = requests[0].ids[-1]
        step = self._steps.pop(0) if self._steps else None
        if step is None or step.draft.tree.tokens[0] != root:
            return [Draft(TokenTree.chain([root]))]
        time.sleep(step.draft_s)
        return [step.draft]


def prefill(
    model: PreTrainedModel, cache: OvalCache, ids: torch.Tensor, chunk: int
) -> tuple[int, torch.Tensor]:
    """Reads a prompt [1, T] in parts of equal length; returns the greedy token after it and the last hidden state [C]."""
    for piece in ids.tensor_split(-(-ids.shape[1] // chunk), dim=1):
        logits, hidden = _forward(model, cache, piece, keep=1)
    return int(logits[-1].argmax()), hidden[-1]


def decode_chains(
    model: PreTrainedModel,
    cache: OvalCache,
    text: Sequence[int],
    hidden: torch.Tensor,
    drafter: Drafter,
    new_tokens: int,
    depth: int,
    before_verify: Callable[[Draft], None] | None = None,
    on_step: OnStep | None = None,
) -> ChainRun:
    """Decodes greedily: drafts, verifies in one forward, keeps what is right. The text is that of plain decoding.

    Args:
        model: attached.
        cache: holds all of `text` but its last token; one row.
        text: token ids.
        hidden: last hidden state [C] that gave the last of them.
        drafter: proposes; only the first chain of its trees counts.
        new_tokens: to decode after `text`.
        depth: most tokens of a chain.
        before_verify: is given each draft, to fetch pages for it.
        on_step: called after each step.
    """
    ids, steps = list(text), []
    end = len(ids) + new_tokens
    while len(ids) < end:
        begin = time.perf_counter()
        most = min(depth, end - len(ids) - 1)
        request = DraftRequest(0, ids, hidden, most, most + 1)
        draft = drafter.draft([request])[0]
        draft = Draft(_first_chain(draft.tree).cut(most), draft.states)
        drafted = time.perf_counter()
        if before_verify is not None:
            before_verify(draft)
        fed = torch.tensor([draft.tree.tokens], device=model.device)
        verifying = time.perf_counter()
        logits, states = _forward(model, cache, fed, keep=fed.shape[1])
        right = logits.argmax(-1).tolist()
        done = time.perf_counter()
        chain = draft.tree.tokens[1:]
        accepted = next((i for i, token in enumerate(chain) if token != right[i]), len(chain))
        moved = cache.last_step
        if accepted < len(chain):
            cache.crop(accepted - len(chain))
        ids += [*chain[:accepted], right[accepted]]
        hidden = states[accepted]
        steps.append(ChainStep(draft, accepted, drafted - begin, done - verifying, moved))
        if on_step is not None:
            on_step()
    return ChainRun(tuple(ids[len(text) - 1 :]), tuple(steps))


def _forward(
    model: PreTrainedModel, cache: OvalCache, ids: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 logits [keep, V] and last hidden states [keep, C] of the last tokens of ids [1, T]."""
    with torch.no_grad():
        output = model(
            ids, cache=cache, use_cache=True, logits_to_keep=keep, output_hidden_states=True
        )
    return output.logits[0].float(), output.hidden_states[-1][0, -keep:]


def _first_chain(tree: TokenTree) -> TokenTree:
    """Returns the path of first children."""
    if tree.is_chain:
        return tree
    tokens, node = [tree.tokens[0]], 0
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        tokens.append(token)
    return TokenTree.chain(tokens)

"""What one passage's attention did, page by page and step by step: enough to run any router on it again. Runs no model.

Step t is the forward of token `context + t`; before it, `context + t` tokens are committed. Shapes: T steps, G layer
groups, P pages, C hidden size, L routed layers, H query heads, E value head dim, N sampled steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from oval_core.errors import ConfigError
from oval_core.routing.mass_watch import WATCHED_QUERIES
from oval_core.routing.view import PageHistory

PROMPT_WINDOW = WATCHED_QUERIES
"""Last queries of the prompt that make the history before the first step."""

_FORMAT = "oval-recording-1"
_FACTS = ("kind", "name", "context", "group_of_layer", "token_bytes")
_HALVED = ("mass", "peak", "effect", "hidden", "page_hidden", "newest_hidden", "prompt_mass")
"""Saved in float16; they are judged by rank and share, not to the last digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One passage under full attention. Tensors are float32 unless said otherwise.

    Attributes:
        kind: what sort of passage it is.
        name: which one.
        context: tokens of the prompt.
        starts: long [P] first token of each page, those of the steps included.
        counts: long [P] tokens of each page once it is full.
        group_of_layer: the group of each decoder layer, -1 for a layer that reads everything.
        token_bytes: bytes of one token's K and V in one layer.
        mass: [T, G, P] attention mass of the step's query, mean over the heads and layers of a group.
        peak: [T, G, P] the largest mass in any head and layer of the group.
        effect: [T, G, P] how far the output moves without the page, over the output's norm; mean as in `mass`.
        hidden: [T, C] last hidden state of token `context + t - 1`.
        page_hidden: [P, C] mean last hidden state of each full page.
        newest_hidden: [T, C] the same of the page of token `context + t - 1`, as far as it was filled then.
        signals: by name [T + 1, G, P] log mass by key summaries and the query of token `context + t - 1`, over the
            tokens up to that one; the floor where a page did not exist.
        snapkv: [G, P] mean mass over the last queries of the prompt (`PROMPT_WINDOW`).
        h2o: [G, P] sum of the mass over all queries of the prompt.
        tova: [P] mass of the last query of the prompt, mean over all routed layers and heads.
        prompt_mass: [W, G, P] mass of the last queries of the prompt, one after the other.
        prompt_history: [G, P] after the last queries of the prompt, all pages read.
        sampled: long [N] steps at which partial outputs are kept.
        part_mass: [N, L, H, P] attention mass.
        part_output: bfloat16 [N, L, H, P, E] the page's share of the output: sum of weight times value.
    """

    kind: str
    name: str
    context: int
    starts: torch.Tensor
    counts: torch.Tensor
    group_of_layer: tuple[int, ...]
    token_bytes: int
    mass: torch.Tensor
    peak: torch.Tensor
    effect: torch.Tensor
    hidden: torch.Tensor
    page_hidden: torch.Tensor
    newest_hidden: torch.Tensor
    signals: Mapping[str, torch.Tensor]
    snapkv: torch.Tensor
    h2o: torch.Tensor
    tova: torch.Tensor
    prompt_mass: torch.Tensor
    prompt_history: PageHistory
    sampled: torch.Tensor
    part_mass: torch.Tensor
    part_output: torch.Tensor

    @property
    def num_steps(self) -> int:
        """T."""
        return self.mass.shape[0]

    @property
    def layers_of_group(self) -> torch.Tensor:
        """Decoder layers in each group, long [G]."""
        groups = torch.tensor(self.group_of_layer)
        return torch.bincount(groups[groups >= 0], minlength=self.mass.shape[1])

    def committed(self) -> torch.Tensor:
        """Tokens of each page that are committed before each step, long [T, P]."""
        length = self.context + torch.arange(self.num_steps)
        return (length[:, None] - self.starts).clamp(min=0).minimum(self.counts)

    def exists(self) -> torch.Tensor:
        """Whether a page holds a token that a step's query can see, its own included; bool [T, P]."""
        newest = self.context + torch.arange(self.num_steps)
        return self.starts <= newest[:, None]

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with the facts in its header; a file that is there is whole."""
        tensors = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_FACTS, *_NESTED)
        }
        tensors |= {f"signals.{name}": value for name, value in self.signals.items()}
        history = self.prompt_history
        tensors |= {f"history.{f.name}": getattr(history, f.name) for f in fields(history)}
        facts = {name: getattr(self, name) for name in _FACTS}
        header = {"format": _FORMAT, "facts": json.dumps(facts)}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            save_file({n: _packed(n, t) for n, t in tensors.items()}, unfinished, header)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


_NESTED = ("signals", "prompt_history")


def load_recording(path: str | Path) -> Recording:
    """Reads what `Recording.save` wrote; float16 comes back as float32.

    Raises:
        ConfigError: there is no such file, or it is not a recording.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"recording {path}: cannot be read ({error}). Allowed: a file that Recording.save wrote. Record again."
        ) from error
    if header.get("format") != _FORMAT:
        raise ConfigError(
            f"recording {path}: got format {header.get('format')!r}. Allowed: {_FORMAT!r}. Record again."
        )
    tensors = {n: t.float() if t.dtype == torch.float16 else t for n, t in tensors.items()}
    facts = json.loads(header["facts"])
    facts["group_of_layer"] = tuple(facts["group_of_layer"])
    nested: dict[str, dict[str, torch.Tensor]] = {"signals": {}, "history": {}}
    for full_name in [name for name in tensors if "." in name]:
        owner, name = full_name.split(".", 1)
        nested[owner][name] = tensors.pop(full_name)
    history = PageHistory(**nested["history"])
    return Recording(**facts, **tensors, signals=nested["signals"], prompt_history=history)


def _packed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name in _HALVED or name.startswith("signals."):
        limit = torch.finfo(torch.float16).max
        tensor = tensor.clamp(-limit, limit).half()
    return tensor.contiguous()


def page_bounds(
    num_tokens: int, page_size: int, sizes: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns starts and counts, long [P], of pages that cover a passage: these sizes first, then `page_size` each.

    Raises:
        ConfigError: the sizes are not positive, or hold more tokens than there are.
    """
    if any(size < 1 for size in sizes) or sum(sizes) > num_tokens:
        raise ConfigError(
            f"page sizes: got {sum(sizes)} tokens in {len(sizes)} pages for {num_tokens}. Allowed: sizes from 1 on "
            "that hold no more than these. Give fewer or smaller ones."
        )
    rest = num_tokens - sum(sizes)
    whole, part = divmod(rest, page_size)
    counts = torch.tensor([*sizes, *[page_size] * whole, *([part] if part else [])])
    return counts.cumsum(0) - counts, counts

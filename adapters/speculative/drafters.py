"""Makes the drafter that settings ask for. What a kind needs is imported when it is asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from oval_adapters.routing.resolve import model_facts
from oval_core.errors import ConfigError, did_you_mean
from oval_core.speculation_config import SpeculationConfig
from oval_spec.choices import tree_named
from oval_spec.drafter import Drafter, NullDrafter
from oval_spec.heads import BaseFacts, DraftHeads
from oval_spec.hybrid import HybridDrafter
from oval_spec.layouts import load_heads
from oval_spec.ngram import NgramDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.attachment import Attachment
    from oval_spec.heads.drafter import HeadsDrafter

__all__ = ["MadeDrafter", "base_facts", "check_drafter_names", "create_drafter", "shipped_heads"]

_log = logging.getLogger(__name__)
HEADS_CONFIG = "oval_heads.json"
MOST_NODES = 64
"""Nodes of the largest tree whose worth is worked out."""


@dataclass(frozen=True, slots=True)
class MadeDrafter:
    """A drafter and what is known of it.

    Attributes:
        drafter: proposes tokens.
        tau: tokens that its steps bring with 1, 2, ... nodes, root included; None where nobody measured.
        report: what was found in the folder of its heads, by line.
    """

    drafter: Drafter
    tau: Sequence[float] | None = None
    report: tuple[str, ...] = ()


def create_drafter(
    attachment: Attachment,
    config: SpeculationConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> MadeDrafter:
    """Returns a new drafter for the attached model.

    Args:
        attachment: of the target.
        config: names the drafter.
        tokenizer: of the target, to compare a draft model's with; None compares sizes.
    Raises:
        ConfigError: heads or a draft model are missing, or belong to another model.
    """
    check_drafter_names(config)
    name = config.drafter
    if name == "auto":
        known = _heads_folder(attachment.model, config)
        name = "ngram" if known is None else "hybrid"
        _log.info("speculation.drafter: auto took %r", name)
    if name == "draft":
        from oval_adapters.speculative.draft_model import load_draft_model

        assert config.draft_model is not None, "checked by the settings"
        model = attachment.model
        return MadeDrafter(load_draft_model(config.draft_model, model, tokenizer, config.depth))
    return _MAKERS[name](attachment, config)


def check_drafter_names(config: SpeculationConfig) -> None:
    """Checks tree and heads, whoever drafts; knows no model and loads nothing.

    Raises:
        ConfigError: one of them is neither a name nor a folder.
    """
    if config.tree != "auto":
        tree_named(config.tree)
    shipped, name = shipped_heads(), config.heads
    if name != "auto" and name not in shipped and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"speculation.heads: got {name!r}, no folder; {did_you_mean(name, ['auto', *shipped])} Or a folder with heads, as "
            "`oval train medusa` writes it."
        )


def base_facts(model: PreTrainedModel) -> BaseFacts:
    """Returns what draft heads must agree with."""
    facts = model_facts(model.config)
    return BaseFacts(
        model_type=facts.model_type, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size
    )


def shipped_heads() -> dict[str, Path]:
    """Returns the folders of the draft heads that ship with OVAL, by name."""
    root = Path(str(resources.files("oval_adapters.assets"))) / "heads"
    if not root.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{HEADS_CONFIG}"))}


def _none(attachment: Attachment, config: SpeculationConfig) -> MadeDrafter:
    return MadeDrafter(NullDrafter(), (1.0,))


def _ngram(attachment: Attachment, config: SpeculationConfig) -> MadeDrafter:
    return MadeDrafter(_lookup(config))


def _medusa(attachment: Attachment, config: SpeculationConfig) -> MadeDrafter:
    drafter, report = _of_heads(attachment.model, config)
    return MadeDrafter(drafter, _tau(drafter.heads), report)


def _hybrid(attachment: Attachment, config: SpeculationConfig) -> MadeDrafter:
    drafter, report = _of_heads(attachment.model, config)
    return MadeDrafter(HybridDrafter(_lookup(config), drafter), _tau(drafter.heads), report)


def _self(attachment: Attachment, config: SpeculationConfig) -> MadeDrafter:
    from oval_adapters.speculative.self_draft import SelfDrafter

    return MadeDrafter(SelfDrafter(attachment, config))


_MAKERS: Mapping[str, Callable[[Attachment, SpeculationConfig], MadeDrafter]] = MappingProxyType(
    {"none": _none, "ngram": _ngram, "medusa": _medusa, "hybrid": _hybrid, "self": _self}
)


def _lookup(config: SpeculationConfig) -> NgramDrafter:
    return NgramDrafter(
        ngram_max=config.ngram_max, ngram_min=config.ngram_min, depth=config.ngram_depth
    )


def _of_heads(
    model: PreTrainedModel, config: SpeculationConfig
) -> tuple[HeadsDrafter, tuple[str, ...]]:
    from oval_spec.heads.drafter import HeadsDrafter

    folder = _heads_folder(model, config)
    if folder is None:
        raise ConfigError(
            f"speculation.heads: got 'auto', and no heads ship for such a model ({base_facts(model)}). Allowed: a folder "
            "with heads, or another drafter, such as 'ngram'. Train some with `oval train medusa`, or choose one."
        )
    heads, report = load_heads(folder, base_facts(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    heads = heads.to(head.weight.device)
    heads.bind(embedding.weight, head.weight, getattr(head, "bias", None))
    shape = None if config.tree == "auto" else tree_named(config.tree)
    return HeadsDrafter(heads, shape), tuple(report.lines())


def _heads_folder(model: PreTrainedModel, config: SpeculationConfig) -> Path | None:
    """Returns the folder that settings name; under `auto` that of the heads that ship for such a model, if any do."""
    shipped = shipped_heads()
    if config.heads != "auto":
        return shipped.get(config.heads, Path(config.heads).expanduser())
    facts = base_facts(model)
    for name, folder in shipped.items():
        base = json.loads((folder / HEADS_CONFIG).read_text(encoding="utf-8"))["base"]
        if BaseFacts(**base) == facts:
            _log.info("speculation.heads: auto took %r, trained for such a model", name)
            return folder
    return None


def _tau(heads: DraftHeads) -> Sequence[float] | None:
    from oval_spec.tree_search import search_tree, tau_by_nodes

    if heads.accuracy is None:
        return None
    return tau_by_nodes(search_tree(heads.accuracy, MOST_NODES), heads.accuracy)

"""The signals that others select by, as routers: what a learned one must beat. Formulas: the papers named.

Shapes as in `view.py`. A page that was never read has no mass: it comes after all others, the newest first.
"""

from __future__ import annotations

import torch

from oval_core.routing.router import Lead
from oval_core.routing.view import EPS, PageView

_NOTHING: frozenset[str] = frozenset()


def _log(mass: torch.Tensor) -> torch.Tensor:
    return (mass + EPS).log()


class Persistence:
    """The mass that a page got when it was last read: reuse of the last step's pages."""

    name = "persistence"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns log of the last mass."""
        return _log(view.history.last)


class Ema:
    """Moving average of the mass."""

    name = "ema"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns log of the fast average."""
        return _log(view.history.fast)


class Prr:
    """Moving average of having been selected (PRR, arXiv 2606.30389); among equals, the last mass."""

    name = "prr"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns log of the average."""
        return _log(view.history.chosen) + 1e-3 * _log(view.history.last)


class H2o:
    """Accumulated mass over the steps that saw the page (H2O, arXiv 2306.14048; divided by them, as kvpress does)."""

    name = "h2o"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns log of the mean over all steps."""
        return _log(view.history.total / view.history.steps.clamp(min=1))


class Tova:
    """The last query's mass, one set for all layers (TOVA, arXiv 2401.06104)."""

    name = "tova"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns log of the last mass, mean over groups."""
        last = view.history.last
        return _log(last.mean(-2, keepdim=True).expand(last.shape))


class SnapKv:
    """Mass by the last queries of the prompt, never renewed (SnapKV, arXiv 2404.14469)."""

    name = "snapkv"
    needs = frozenset({"snapkv"})
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns the log mass at the end of the prompt."""
        return view.signals["snapkv"].expand(view.history.last.shape)


class Recency:
    """The newest pages (StreamingLLM, arXiv 2309.17453, with the sinks that are always kept)."""

    name = "recency"
    needs = _NOTHING
    lead: Lead = "step"

    def score(self, view: PageView) -> torch.Tensor:
        """Returns minus the distance."""
        distance = view.distance[..., None, :]
        return (-distance / 1e3).expand(view.history.last.shape)


class Random:
    """Chance, anew at each step: drawn by a seed and the length of the text, so that caches do not disturb each other."""

    name = "random"
    needs = _NOTHING
    lead: Lead = "step"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def score(self, view: PageView) -> torch.Tensor:
        """Returns uniform numbers."""
        drawn = 1_000_003 * self._seed + int(torch.as_tensor(view.length).max())
        generator = torch.Generator().manual_seed(drawn)
        return torch.rand(view.history.last.shape, generator=generator)


class BySignal:
    """Scores by one signal: key summaries against a query, of the step before or of the layer itself."""

    def __init__(self, name: str, signal: str, lead: Lead) -> None:
        self.name = name
        self.needs = frozenset({signal})
        self.lead: Lead = lead
        self._signal = signal

    def score(self, view: PageView) -> torch.Tensor:
        """Returns the signal."""
        return view.signals[self._signal]


def by_signal() -> list[BySignal]:
    """Returns the routers that are one signal each."""
    ahead = [
        ("freekv", "quest"),
        ("freekv_arkvale", "arkvale"),
        ("estimate", "estimate"),
        ("sketch", "sketch"),
    ]
    exact = [
        ("quest", "quest"),
        ("arkvale", "arkvale"),
        ("mean_key", "mean_key"),
        ("sketch_now", "sketch"),
        ("infllm", "infllm"),
        ("cross_layer", "cross_layer"),
        ("oracle_mass", "oracle_mass"),
        ("oracle_output", "oracle_output"),
    ]
    return [
        *[BySignal(name, signal, "step") for name, signal in ahead],
        *[BySignal(name, signal, "layer") for name, signal in exact],
    ]

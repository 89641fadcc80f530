"""Ways to score image pages before the decoder has read one: baselines, controls, CLIP, and the trained router.

Shapes: T text tokens, N image tokens of all images, P image pages of all images, C hidden size, D of CLIP.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from oval_core.errors import ConfigError, did_you_mean
from oval_mm.fusion_router import FusionRouter, FusionView

__all__ = [
    "SCORER_NAMES",
    "ClipScorer",
    "FeatureNormScorer",
    "FusionScorer",
    "ImagePageScorer",
    "ImagePages",
    "KeyMeanScorer",
    "QuestionPages",
    "RandomScorer",
    "UniformScorer",
    "check_scorer_name",
    "create_scorer",
]

_PLASTIC = 1.32471795724474602596

SCORER_NAMES = ("clip", "feature-norm", "fusion", "key-mean", "random", "uniform")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePages:
    """The pages of one image.

    Attributes:
        features: [n, C] projected image features, in token order.
        pages: places of each page's tokens, a partition of range(n).
        shape: rows and columns of the image's tokens; with newline tokens, those count as one column.
        clip: [p, D] embeddings of the pages in CLIP's joint space; None unless the scorer needs them.
    """

    features: torch.Tensor
    pages: Sequence[Sequence[int]]
    shape: tuple[int, int]
    clip: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionPages:
    """What a scorer may know of one row: the text that asks, and the pages of its images.

    Attributes:
        text: [T, C] what the decoder gets for the text tokens.
        images: in the order of the row.
        question: [D] CLIP embedding of the text; None unless the scorer needs it.
    """

    text: torch.Tensor
    images: Sequence[ImagePages]
    question: torch.Tensor | None = None


class ImagePageScorer(Protocol):
    """Scores image pages for a question."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def needs_clip(self) -> bool:
        """Whether it reads `QuestionPages.question` and `ImagePages.clip`."""
        ...

    def score(self, row: QuestionPages) -> torch.Tensor:
        """Returns scores [P] of a row's image pages, image after image; higher is better, comparable across images."""
        ...


class RandomScorer:
    """Pages at random: another order for another image, question or seed, the same one for the same."""

    name = "random"
    needs_clip = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`."""
        text = row.text.double().sum(0)[:16].tolist()
        parts = []
        for place, image in enumerate(row.images):
            content = image.features.double().sum(0)[:16].tolist()
            told = repr((self._seed, place, _rounded(text), _rounded(content))).encode()
            number = int.from_bytes(hashlib.sha256(told).digest()[:7], "big")
            generator = torch.Generator().manual_seed(number)
            parts.append(torch.rand(len(image.pages), generator=generator))
        return torch.cat(parts)


class UniformScorer:
    """Pages spread evenly over each image, whatever the budget: first places of a two-dimensional lattice (R2).

    The sequence steps by powers of 1/1.3247 (the plastic number) in each direction; any beginning of it is spread evenly.
    """

    name = "uniform"
    needs_clip = False

    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`."""
        told = [(image.shape, tuple(map(tuple, image.pages))) for image in row.images]
        return torch.tensor([rank for own in told for rank in _spread(*own)])


class FeatureNormScorer:
    """Pages with large projected features first: knows nothing of the question."""

    name = "feature-norm"
    needs_clip = False

    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`."""
        norms = [_page_means(image.features.float().norm(dim=-1, keepdim=True), image) for image in row.images]  # fmt: skip
        return torch.cat(norms)[:, 0].cpu()


class KeyMeanScorer:
    """Cosine of a page's mean feature and the mean text token, as the decoder gets them."""

    name = "key-mean"
    needs_clip = False

    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`."""
        question = row.text.float().mean(0)
        keys = torch.cat([_page_means(image.features.float(), image) for image in row.images])
        return F.cosine_similarity(keys, question.to(keys.device), dim=-1).cpu()


class ClipScorer:
    """Cosine of question and page in CLIP's joint space: zero-shot."""

    name = "clip"
    needs_clip = True

    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`."""
        assert row.question is not None, "needs_clip"
        parts = []
        for image in row.images:
            assert image.clip is not None, "needs_clip"
            parts.append(F.cosine_similarity(image.clip.float(), row.question.float(), dim=-1))
        return torch.cat(parts).cpu()


class FusionScorer:
    """The trained router."""

    name = "fusion"
    needs_clip = False

    def __init__(self, router: FusionRouter) -> None:
        self._router = router.eval()

    @torch.no_grad()
    def score(self, row: QuestionPages) -> torch.Tensor:
        """See `ImagePageScorer`. Scores are by token, so that budgets are spent where mass is dense."""
        view = fusion_view(row.text, row.images)
        return self._router.density(view)[view.num_text_pages :].float().cpu()


def fusion_view(
    text: torch.Tensor, images: Sequence[ImagePages], text_page_size: int = 16
) -> FusionView:
    """Returns a row as the router sees it: text cut into pages of one size, image pages as they are."""
    features = [image.features for image in images]
    page_of, first = [], 0
    for image in images:
        own = torch.empty(len(image.features), dtype=torch.long)
        for page, places in enumerate(image.pages):
            own[list(places)] = first + page
        page_of.append(own)
        first += len(image.pages)
    device = text.device
    image_page = torch.cat(page_of) if page_of else torch.empty(0, dtype=torch.long)
    return FusionView(
        text=text,
        image=torch.cat(features).to(text) if features else text[:0],
        text_page=(torch.arange(len(text)) // text_page_size).to(device),
        image_page=image_page.to(device),
    )


def create_scorer(
    name: str, *, seed: int = 0, load_router: Callable[[str], FusionRouter]
) -> ImagePageScorer:
    """Returns the scorer of this name; another name is the folder of a trained `FusionRouter`.

    Args:
        name: one of `SCORER_NAMES` but `fusion`, or a folder.
        seed: of the random one.
        load_router: reads a folder.
    Raises:
        ConfigError: there is neither.
    """
    plain: dict[str, Callable[[], ImagePageScorer]] = {
        "clip": ClipScorer,
        "feature-norm": FeatureNormScorer,
        "key-mean": KeyMeanScorer,
        "random": lambda: RandomScorer(seed),
        "uniform": UniformScorer,
    }
    if not check_scorer_name(name):
        return plain[name]()
    return FusionScorer(load_router(name))


def check_scorer_name(name: str) -> bool:
    """Returns whether a name is a folder's, by how it is written; the folder itself is not looked at.

    Raises:
        ConfigError: it is neither a folder's nor one of `SCORER_NAMES` but `fusion`.
    """
    plain = [own for own in SCORER_NAMES if own != "fusion"]
    if name in plain:
        return False
    if "/" not in name and "\\" not in name and not name.startswith((".", "~")):
        raise ConfigError(
            f"vision.router: got {name!r}; {did_you_mean(name, ['auto', *plain])} Or the folder of a trained fusion router."
        )
    return True


def _rounded(values: Sequence[float]) -> list[float]:
    # the same picture in another batch differs in the last bits
    return [round(value, 2) for value in values]


def _page_means(values: torch.Tensor, image: ImagePages) -> torch.Tensor:
    return torch.stack([values[list(places)].mean(0) for places in image.pages])


@functools.lru_cache(maxsize=64)
def _spread(shape: tuple[int, int], pages: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Returns minus the rank of each page: the free one nearest to each point of the sequence comes next."""
    rows, columns = shape
    centres = []
    for places in pages:
        y = sum(place // columns for place in places) / len(places) + 0.5
        x = sum(place % columns for place in places) / len(places) + 0.5
        centres.append((y / rows, x / columns))
    ranks, free = [0.0] * len(pages), set(range(len(pages)))
    for rank in range(len(pages)):
        y, x = (0.5 + rank / _PLASTIC) % 1, (0.5 + rank / _PLASTIC**2) % 1
        far = {page: (centres[page][0] - y) ** 2 + (centres[page][1] - x) ** 2 for page in free}
        nearest = min(sorted(free), key=far.__getitem__)
        ranks[nearest] = -float(rank)
        free.remove(nearest)
    return tuple(ranks)

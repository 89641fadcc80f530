"""How much of the decoder's attention the image pages hold that different scorers would choose. Reads records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from oval_mm.fusion_clip import ClipSample
from oval_mm.fusion_training import FusionRecord, oracle_recall, record_recall
from oval_mm.page_choice import ImagePages, ImagePageScorer, QuestionPages

__all__ = ["question_pages", "recall_table"]

Sampled = tuple[FusionRecord, ClipSample | None]


def question_pages(record: FusionRecord, sample: ClipSample | None = None) -> QuestionPages:
    """Returns a record as scorers see a row.

    Args:
        record: with the shapes of its images.
        sample: what CLIP says of it, for scorers that need it.
    """
    view = record.view
    images, start, first = [], 0, 0
    for rows, columns in record.shapes:
        end = start + rows * columns
        page_of = view.image_page[start:end].cpu()
        count = int(page_of.max()) + 1 - first
        own = [(page_of == first + page).nonzero()[:, 0].tolist() for page in range(count)]
        clip = None if sample is None else sample.pages[first : first + count]
        images.append(
            ImagePages(features=view.image[start:end], pages=own, shape=(rows, columns), clip=clip)
        )
        start, first = end, first + count
    assert start == len(view.image), "shapes of all images"
    question = None if sample is None else sample.question
    return QuestionPages(text=view.text, images=images, question=question)


@torch.no_grad()
def recall_table(
    scorers: Mapping[str, ImagePageScorer], rows: Sequence[Sampled], shares: Sequence[float]
) -> list[dict[str, float]]:
    """Returns a row for each share of the image pages: the mass that each scorer's pages hold, mean over records.

    Beside the scorers stand `oracle`, who knows the masses, and `random`: what a random choice holds on average. Scorers
    that need CLIP are left out where samples are missing.

    Args:
        scorers: by name.
        rows: records, with what CLIP says of them.
        shares: of the pages.
    """
    records = [record for record, _ in rows]
    has_clip = all(sample is not None for _, sample in rows)
    able = {name: own for name, own in scorers.items() if has_clip or not own.needs_clip}
    scores = {
        name: [own.score(question_pages(record, sample)) for record, sample in rows]
        for name, own in able.items()
    }
    table = []
    for share in shares:
        row = {"share": share, "oracle": oracle_recall(records, share)}
        for name, found in scores.items():
            recalls = [record_recall(s, r, share) for s, r in zip(found, records, strict=True)]
            row[name] = sum(recalls) / len(recalls)
        counts = [record.view.num_image_pages for record in records]
        row["random"] = sum(max(1, int(share * n + 1e-6)) / n for n in counts) / len(counts)
        table.append(row)
    return table

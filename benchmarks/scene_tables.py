"""Writes the questions that a small LLaVA is judged by, in MMBench's form: new scenes, of a seed that no training has.

    python benchmarks/scene_tables.py OUT PICTURES [PICTURES ...] [--per-task N] [--seed S] [--album K]

Three files: known.tsv (things that were trained on), never_seen.tsv (things that were not, with such options), and
albums.tsv (a question about one of many pictures). They are derived from the pictures and have their licence.
"""

import argparse
import json
from pathlib import Path

from oval_mm.scenes import ALBUM_TASKS, TASKS, Library, make_items, write_mmbench_tsv


def main() -> None:
    """Writes the files; prints how many questions each has, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--per-task", type=int, default=120)
    parser.add_argument("--seed", type=int, default=77_000)
    parser.add_argument("--split-seed", type=int, default=0, help="that of the training")
    parser.add_argument("--album", type=int, default=8)
    given = parser.parse_args()
    library = Library(given.pictures, given.split_seed)
    tables = {
        "known": (tuple(TASKS), False),
        "never_seen": (tuple(TASKS), True),
        "albums": (tuple(ALBUM_TASKS), False),
    }
    counts = {}
    for name, (tasks, held_out) in tables.items():
        items = make_items(
            library,
            seed=given.seed,
            per_task=given.per_task,
            tasks=tasks,
            held_out=held_out,
            album=given.album,
        )
        counts[name] = write_mmbench_tsv(given.out / f"{name}.tsv", library, list(items), split=name)  # fmt: skip
    print(json.dumps({"questions": counts, "out": str(given.out)}))


if __name__ == "__main__":
    main()

"""Makes a folder of captioned cut-outs, for `oval train llava --pictures`, of an unpacked npm package of emoji.

    npm pack emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz
    python benchmarks/emoji_cutouts.py package google emoji/

The art of that package is Noto Emoji (Apache-2.0); the pictures stay out of this repository.
"""

import json
import shutil
import sys
from pathlib import Path

KINDS = ("Animals & Nature", "Food & Drink", "Objects", "Travel & Places", "Activities")
SKIPPED = ("clock face", "moon", "mahjong", "japanese", "ideograph", "symbol", "medal", "with ", "postal", "emblem")  # fmt: skip


def main() -> None:
    """Copies pictures of things under their names; prints how many, as JSON."""
    package, art, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    count = 0
    for entry in json.loads((package / "emoji.json").read_text(encoding="utf-8")):
        name = (entry["name"] or "").lower().replace("-", " ")
        picture = package / "img" / art / "64" / entry["image"]
        if entry["category"] not in KINDS or any(part in name for part in SKIPPED):
            continue
        if not picture.exists():
            continue
        name = name.removesuffix(" face")  # a "dog face" is a dog: it is held out with it
        folder = out / entry["category"].split(" ")[0].lower() / entry["subcategory"]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder / entry["image"])
        (folder / entry["image"]).with_suffix(".txt").write_text(f"{name}\n", encoding="utf-8")
        count += 1
    print(json.dumps({"pictures": count, "folder": str(out)}))


if __name__ == "__main__":
    main()

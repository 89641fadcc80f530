"""Composed scenes with questions about them: what a small LLaVA is trained and judged on, made from captioned cut-outs."""

from oval_mm.scenes.captions import Caption, read_caption
from oval_mm.scenes.library import Cutout, Library
from oval_mm.scenes.questions import ALBUM_TASKS, TASKS, Choice, Said, ask, ask_album, tell
from oval_mm.scenes.scene import COLOURS, KINDS, Scene, coverage, draw, make_scene
from oval_mm.scenes.table import Item, make_album, make_items, write_mmbench_tsv

__all__ = [
    "ALBUM_TASKS",
    "COLOURS",
    "KINDS",
    "TASKS",
    "Caption",
    "Choice",
    "Cutout",
    "Item",
    "Library",
    "Said",
    "Scene",
    "ask",
    "ask_album",
    "coverage",
    "draw",
    "make_album",
    "make_items",
    "make_scene",
    "read_caption",
    "tell",
    "write_mmbench_tsv",
]

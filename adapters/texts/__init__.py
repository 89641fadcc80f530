"""Texts to train and judge page routers on: running text, facts to look back for, dialogues, and passkeys to grade."""

from __future__ import annotations

from oval_adapters.texts.collect import KINDS, passages
from oval_adapters.texts.passage import Passage
from oval_adapters.texts.passkey import PasskeyCase, PasskeyQuestion, grade, passkey_cases
from oval_adapters.texts.source import Source, read_source

__all__ = [
    "KINDS",
    "Passage",
    "PasskeyCase",
    "PasskeyQuestion",
    "Source",
    "grade",
    "passages",
    "passkey_cases",
    "read_source",
]

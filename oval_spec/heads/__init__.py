"""Draft heads: small modules on the target's hidden state that propose the next tokens.

Import from here; the modules' own docstrings say what each is.
"""

from oval_spec.heads.base import DraftHeads
from oval_spec.heads.create import create_heads
from oval_spec.heads.drafter import Beam, HeadsDrafter
from oval_spec.heads.facts import BaseFacts
from oval_spec.heads.medusa import MedusaHeads
from oval_spec.heads.sequential import SequentialHeads
from oval_spec.heads.vocabulary import IGNORED, DraftVocabulary

__all__ = [
    "IGNORED",
    "BaseFacts",
    "Beam",
    "DraftHeads",
    "DraftVocabulary",
    "HeadsDrafter",
    "MedusaHeads",
    "SequentialHeads",
    "create_heads",
]

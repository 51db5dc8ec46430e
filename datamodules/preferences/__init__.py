"""Preference pairs in all common forms, and synthetic ones with a known reward."""

from datamodules.preferences.formats import Example, parse, read_rows
from datamodules.preferences.preferences import Preferences, read_pairs
from datamodules.preferences.toys import FiniteSet, LengthTarget, LengthTilt
from lightning_modules.components.language.encoding import (
    PreferenceBatch,
    PromptBatch,
    SupervisedBatch,
)

__all__ = [
    "Example",
    "FiniteSet",
    "LengthTarget",
    "LengthTilt",
    "PreferenceBatch",
    "Preferences",
    "PromptBatch",
    "SupervisedBatch",
    "parse",
    "read_pairs",
    "read_rows",
]

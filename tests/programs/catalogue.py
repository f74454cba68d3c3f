"""All programs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.programs.images import IMAGES
from tests.programs.others import OTHERS
from tests.programs.program import Program
from tests.programs.texts import TEXTS

PROGRAMS: Sequence[Program] = (*IMAGES, *TEXTS, *OTHERS)


def chosen(patterns: Sequence[str]) -> list[Program]:
    """Those in whose names one of the patterns occurs; all, if there are none."""
    return [p for p in PROGRAMS if not patterns or any(text in p.name for text in patterns)]

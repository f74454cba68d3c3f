"""The module that docs/extending.md shows, as a user would have it."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS
from foreprop.features.compression import codecs

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
NAME = "my_codecs"


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """What is registered meanwhile is gone afterwards."""
    registries: tuple[dict[str, Any], ...] = (codecs._registered, ELEMENTWISE_OPTIMIZERS)
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, known in zip(registries, before, strict=True):
            registry.clear()
            registry.update(known)


def page_source() -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M))


def page_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported, and gone when the test is over."""
    (folder / f"{NAME}.py").write_text(page_source())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module

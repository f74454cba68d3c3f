"""What a worker of a loader is asked, whatever torch's description of it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from foreprop.session import shares
from foreprop.session.shares import note_questions


class _Older:
    """Worker info as torch 2.6 has it."""

    def __init__(self, **values: Any) -> None:
        for key, value in values.items():
            setattr(self, key, value)
        self.__keys = tuple(values)
        self.__initialized = True

    def __setattr__(self, key: str, value: Any) -> None:
        if hasattr(self, "_Older__initialized"):
            raise RuntimeError("cannot assign attributes")
        super().__setattr__(key, value)


@dataclass(frozen=True, slots=True)
class _Newer:
    """Worker info as torch 2.13 has it."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


@pytest.mark.parametrize("kind", [_Older, _Newer])
def test_questions_are_noted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = kind(id=1, num_workers=3, seed=5, dataset="data")
    monkeypatch.setattr(shares, "get_worker_info", lambda: info)
    asked = note_questions()
    assert (info.id, info.seed) == (1, 5)
    assert not asked  # one that only seeds itself does not divide
    assert isinstance(info, kind)
    assert note_questions() is asked
    assert info.num_workers == 3
    assert asked == {"num_workers"}
    assert info.dataset == "data"
    assert note_questions() == {"num_workers", "dataset"}


def test_outside_of_workers_nothing_is() -> None:
    assert note_questions() == set()

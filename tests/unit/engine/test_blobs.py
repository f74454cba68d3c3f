"""The shelf for buffers and frozen parameters."""

from __future__ import annotations

from foreprop.engine.calls import BlobShelf


def test_who_asks_too_early_is_named_when_the_blob_comes() -> None:
    shelf = BlobShelf(readers=3)
    assert shelf.pull(0, 4, rank=2) is None
    assert shelf.pull(0, 4, rank=1) is None
    assert shelf.put(0, 3, b"old") == []
    assert shelf.put(0, 4, b"new") == [2, 1]
    assert shelf.pull(0, 4, rank=3) == b"new"


def test_the_last_two_steps_of_buffers_are_kept() -> None:
    shelf = BlobShelf(readers=1)
    for step in range(4):
        shelf.put(0, step, bytes([step]))
    assert [shelf.pull(0, step, rank=1) for step in (3, 2)] == [b"\x03", b"\x02"]
    assert shelf.pull(0, 1, rank=1) is None


def test_a_frozen_parameter_goes_when_every_reader_has_it() -> None:
    shelf = BlobShelf(readers=2)
    assert shelf.pull(5, 0, rank=1) is None
    assert shelf.put(5, 0, b"frozen") == [1]
    assert shelf.pull(5, 0, rank=2) == b"frozen"
    assert shelf.pull(5, 0, rank=1) is None

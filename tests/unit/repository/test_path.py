"""docs/path.md is true: a slice takes these stages in this order, and the functions exist."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import foreprop
from foreprop.core.frames import Stage
from foreprop.tools.report.tracefile import read_folder
from tests.cluster import worlds

PAGE = Path(__file__).parents[3] / "docs" / "path.md"
PACKAGES = "core|engine|params|backends|session|compression"
FUNCTION = re.compile(rf"`((?:{PACKAGES})\.[\w.]+)`")
STEP = 3
SRC = Path(foreprop.__file__).parent
MOST = {"servers": (111, 25), "workers": (168, 28)}
"""Functions and files of a round trip, by who updates."""
"""Of a round trip whose reply is there when the parameter is used."""
MOST_READ_FILES, MOST_READ_LINES = 10, 2_620


def record_stages(folder: Path, plane: str) -> list[dict[str, Any]]:
    """The stages of one slice in one step, in the order in which they began."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], trace=str(folder), plane=plane):
        for _ in range(STEP + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    events = [dict(span) for trace in read_folder(folder) for span in trace.spans]
    names = [stage.value for stage in Stage]
    ours = [
        event for event in events if event.get("cat") in names and event["args"]["step"] == STEP
    ]
    # the file's times are to a quarter of a microsecond: what begins in the same one is in order
    return sorted(ours, key=lambda event: (event["ts"], names.index(event["cat"])))


@pytest.mark.parametrize("plane", ["native", "python"])
def test_a_slice_takes_every_stage_once_and_in_order(tmp_path: Path, plane: str) -> None:
    events = record_stages(tmp_path, plane)
    assert [Stage(event["cat"]) for event in events] == list(Stage)
    assert {event["name"] for event in events} == {"weight"}
    assert [event["args"]["slice"] for event in events] == [-1, 0, 0, 0, 0, 0, 0, 0, -1]


def round_trip(update: str) -> set[tuple[str, str, int]]:
    """File, name and line of our functions that one slice's round trip calls, in any thread."""
    called: set[tuple[str, str, int]] = set()
    inside = f"{SRC}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if recording and event == "call" and code.co_filename.startswith(inside):
            file = code.co_filename.removeprefix(inside)
            called.add((file, code.co_qualname, code.co_firstlineno))

    recording = False
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        about: Any = {"update": update, "plane": "python"}
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **about) as session:
            for _ in range(STEP):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            session.flush()
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            training: Any = session._training  # type: ignore[attr-defined]
            engine = training.backends.engines[0]
            counters, missing = engine.counters, engine.machine._missing
            recording = True
            loss.backward()
            optimizer.step()
            while counters.replies <= STEP or any(missing):  # without a call of ours
                time.sleep(0.001)
            model(torch.ones(2, 4))
            recording = False
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    return called


@pytest.mark.parametrize("update", MOST)
def test_a_round_trip_calls_few_functions_of_few_files(update: str) -> None:
    """Where workers update, the average and the optimizer's own step come on top."""
    called = round_trip(update)
    most_functions, most_files = MOST[update]
    assert len(called) <= most_functions, sorted(called)
    assert len({file for file, _, _ in called}) <= most_files
    assert f"{most_functions} functions of {most_files} files" in PAGE.read_text()


def test_the_reading_list_is_as_long_as_the_page_says() -> None:
    part = PAGE.read_text().partition("## What to read")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", part, flags=re.MULTILINE)
    lines = sum(len((SRC / file).read_text().splitlines()) for file in files)
    assert len(files) <= MOST_READ_FILES
    assert lines <= MOST_READ_LINES
    assert f"about {round(lines, -2):,} lines" in part


def sections() -> dict[str, str]:
    """The page's text under each numbered heading, by the heading's stage."""
    parts = re.split(r"^## (?:\d+\. )?`?([^`\n]+)`?$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_tells_every_stage_in_order() -> None:
    named = [name for name in sections() if name in Stage.__members__]
    assert named == [stage.name for stage in Stage]


def test_every_stage_has_code_a_thread_and_what_may_go_wrong() -> None:
    texts = sections()
    for stage in Stage:
        text = texts[stage.name]
        assert FUNCTION.search(text), stage
        assert "**Thread:**" in text, stage
        assert "**What may go wrong:**" in text, stage


def is_function(name: str) -> bool:
    package, module, *path = name.split(".")
    package = f"features.{package}" if package == "compression" else package
    found: Any = importlib.import_module(f"foreprop.{package}.{module}")
    for part in path:
        found = getattr(found, part, None)
    return callable(found)


def test_every_function_that_the_page_names_exists() -> None:
    names = sorted(set(FUNCTION.findall(PAGE.read_text())))
    assert [name for name in names if not is_function(name)] == []

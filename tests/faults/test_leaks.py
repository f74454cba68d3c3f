"""Threads, descriptors and children after a session equal those before, however it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreprop.backends.composed import ServerComposer, ServerWork
from foreprop.core.frames import Peers
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Kind
from foreprop.engine.world import World
from tests.faults import endings
from tests.faults.endings import check_nothing_left, orderly
from tests.faults.wire_peers import HANGS_S, manifest_of, session
from tests.process.harness import Zygote, running
from tests.process.train_script import Scenario
from tests.tiers import long_cases


@pytest.mark.parametrize(
    "work",
    [
        *[orderly, endings.raising, endings.cut, endings.refused],
        *long_cases(endings.paced, endings.real_servers, endings.real_servers_failing),
    ],
    ids=lambda work: work.__name__,
)
def test_nothing_is_left(work: Callable[[World], None]) -> None:
    check_nothing_left(work)


@pytest.mark.process
def test_nothing_is_left_of_a_server_in_another_process(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.start(zygote, run.environment(Scenario()), script=Path(endings.__file__))
        run.wait()
        assert "nothing is left" in run.output(), run.output()
        run.check_nothing_left()


@pytest.mark.parametrize("sessions", [3, *long_cases(15)])
def test_many_sessions_one_after_another(sessions: int) -> None:
    check_nothing_left(orderly, times=sessions, local_size=1)


class SlowToDecide(ServerComposer):
    """Who has joined is known only when something has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.deciding, self.may_go_on = threading.Event(), threading.Event()
        self.composed = False

    def peers(self, manifest: Manifest) -> Peers:
        self.deciding.set()
        assert self.may_go_on.wait(HANGS_S)
        return super().peers(manifest)

    def compose(self, *about: Any) -> ServerWork:
        self.composed = True
        return super().compose(*about)


def test_nothing_begins_at_a_server_that_has_ended() -> None:
    """A node's loss may end a substitute at the moment at which the last survivor joins it."""

    def work(_: World) -> None:
        composer = SlowToDecide()
        with session(joined=False, composer=composer, world_size=1) as running:
            worker = running.stranger()
            worker.greet()
            worker.send(Kind.MANIFEST, manifest_of(1).encode())
            assert composer.deciding.wait(HANGS_S)
            running.server.end()
            worker.expect_closed()  # and who ends it waits for who decides
            composer.may_go_on.set()
            running.wait()
            assert not composer.composed

    check_nothing_left(work)

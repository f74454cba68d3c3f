"""When a worker is sure of who has left, and within which step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from foreprop.core.dealing import MemberChange
from foreprop.features.members.membershipview import MembershipView, keep_view, maybe_view
from tests.cluster import worlds


class Engine:
    """A worker's, as far as view asks it: ``holders`` are the servers that hold slices."""

    def __init__(
        self, *, workers: int = 3, holders: tuple[int, ...] = (0, 1), beside: bool = False
    ):
        self.rank, self.steps = 0, 0
        self.lock = threading.RLock()
        self.manifest = SimpleNamespace(world_size=workers, most_workers=workers)
        self.slices = [SimpleNamespace(server=server) for server in holders]
        self.config = SimpleNamespace(step_timeout_s=1.0, join=None)
        self.beside = 1 if beside else None
        self.progress = self
        self.meanwhile: list[Callable[[], object]] = []
        """What comes while somebody waits."""

    def notify(self) -> None: ...

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]
    ) -> None:
        assert describe() == "all servers to tell who has left; some have told of [1]"
        while not condition():
            self.meanwhile.pop(0)()


def make(**about: Any) -> tuple[Any, MembershipView, list[Any]]:
    engine: Any = Engine(**about)
    view = MembershipView(engine, engine.beside)
    announced: list[Any] = []
    view.on_membership.append(lambda change, members: announced.append((change.step, members)))
    return engine, view, announced


def test_all_servers_must_have_told() -> None:
    """The step is the last one that any has a push of."""
    _, view, announced = make()
    view.hear_left(1, 0, 4)
    assert (view.known(), announced, view.members) == ([], [], [0, 1, 2])
    view.hear_left(1, 1, 5)
    assert view.known() == view.changes() == [MemberChange(1, 5)]
    assert (announced, view.members) == ([(5, [0, 2])], [0, 2])
    view.hear_left(1, 0, 9)
    assert len(announced) == 1, "once is enough"


def test_a_server_without_slices_is_not_asked() -> None:
    _, view, announced = make(holders=(1,))
    view.hear_left(2, 0, 0)
    assert announced == []
    view.hear_left(2, 1, 7)
    assert announced == [(7, [0, 1])]


def test_a_server_that_goes_with_its_node_is_not_asked() -> None:
    """Nor one that has gone before: what it tells does not reach all."""
    _, view, announced = make(workers=4, holders=(0, 1, 2, 3), beside=True)
    view.hear_left(1, 1, 9)
    view.hear_left(1, 0, 5)
    view.hear_left(1, 2, 4)
    view.hear_left(1, 3, 4)
    view.hear_left(2, 1, 8)
    view.hear_left(2, 0, 7)
    view.hear_left(2, 3, 6)
    assert announced == [(5, [0, 2, 3]), (7, [0, 3])]


def test_who_joins_is_a_member_again() -> None:
    """And may leave again, of which a server beside the first one does not tell."""
    _, view, announced = make(workers=3, holders=(0, 1, 2), beside=True)
    for server in (0, 2):
        view.hear_left(1, server, 4)
    for server in (0, 2):
        view.hear_joined(1, server, 9)
    for server in (0, 2):
        view.hear_left(1, server, 11)
    assert announced == [(4, [0, 2]), (9, [0, 1, 2]), (11, [0, 2])]
    changes = [MemberChange(1, 4), MemberChange(1, 9, joins=True), MemberChange(1, 11)]
    assert view.known() == changes


@pytest.mark.parametrize(("done", "waits"), [(5, False), (6, True)])
def test_where_it_could_matter_the_rest_is_waited_for(done: int, waits: bool) -> None:
    engine, view, _ = make()
    view.hear_left(1, 0, 4)
    engine.steps = done
    engine.meanwhile = [lambda: view.hear_left(1, 1, 4)]
    assert view.changes() == ([MemberChange(1, 4)] if waits else [])
    assert len(engine.meanwhile) == (0 if waits else 1)


def test_only_the_thread_that_makes_the_steps_can_ask() -> None:
    _, view, _ = make()
    found = [view.is_training_thread]
    thread = threading.Thread(target=lambda: found.append(view.is_training_thread))
    thread.start()
    thread.join()
    assert found == [True, False]


def test_each_world_has_its_own_while_its_session_lasts() -> None:
    one, other = worlds(2)
    _, view, _ = make()
    keep_view(one, view)
    assert maybe_view(one) is view
    assert maybe_view(other) is None
    del view
    assert maybe_view(one) is None


def test_who_has_made_a_step_and_who_has_left_before() -> None:
    """What a checkpoint asks: a word that only some servers have said is waited for."""
    engine, view, _ = make(workers=4)
    assert view.present(5) == [0, 1, 2, 3]
    view.hear_left(1, 0, 4)
    assert not view.is_settled()
    view.hear_left(1, 1, 5)
    assert view.is_settled()
    assert view.present(5) == [0, 2, 3]
    assert (view.left_before(5), view.left_before(6)) == ([], [1])
    engine.steps = 7
    view.hear_joined(1, 0, 9)
    assert (view.is_settled(), view.coming()) == (False, [])
    engine.steps = 8
    assert view.coming() == [9]
    view.hear_joined(1, 1, 9)
    assert view.is_settled()
    assert (view.present(8), view.present(9)) == ([0, 2, 3], [0, 1, 2, 3])
    assert view.left_before(9) == []

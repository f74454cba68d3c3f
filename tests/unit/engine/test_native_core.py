"""The native machines against those of `foreprop.core`, event by event: the same instructions,
in the same order, and of what does not fit the same error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.closing import AllMembers
from foreprop.core.collect import DropPush, SendSquares, SliceUpdated, UpdateSlice
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import (
    NO_TOKEN,
    CameAfter,
    Closing,
    FailSession,
    Finish,
    FrameSent,
    GradientReady,
    MessageReady,
    NotifyArrived,
    PeerLeft,
    PrioritiesLearned,
    PullArrived,
    PullsDue,
    PushArrived,
    ReplyArrived,
    SendFrame,
    SlicesGoOn,
    SlicesLost,
    ValueArrived,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.membership import MemberLeft, Members, PeerDropped
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled, MemberJoined
from foreprop.core.norm import ZERO
from foreprop.core.pushwindow import PushWindow
from foreprop.core.sendqueue import SendBound, Turns
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.takeover import SlicesSettled
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import ForepropError
from tests.native.stepped import NativeServer, NativeWorker, library

library()  # skips all of this where there is no compiler

EXAMPLES = 100
FLAGS = [
    0,
    0,
    Flag.GRADIENT,
    Flag.NO_GRADIENT,
    Flag.NO_GRADIENT | Flag.GRADIENT,
    Flag.GRADIENT | Flag.MEASURE,
    Flag.VALUE_CHANGED,
]
ORDERS = st.sampled_from(["priority", "priority", "fifo"])
REPLIES = st.sampled_from(["broadcast", "broadcast", "notify", "pull"])
TURNS = st.builds(
    Turns,
    first=st.integers(0, 3),
    at_once=st.sampled_from([1, 2, 12]),
    at_least=st.sampled_from([0, 1, 2]),
    in_order=st.booleans(),
)


def outcome(machine: Any, event: Any) -> tuple[list[Any], Any]:
    """Instructions, and the class and text of an error."""
    try:
        told = machine.handle(event)
    except ForepropError as error:
        return [], (type(error), str(error))
    pythons = (*_PYTHONS, Finish) if type(event) is PeerDropped else _PYTHONS
    shown = [_shown(each) for each in told if type(each) not in pythons]
    failed = [type(each) is FailSession for each in shown]
    return shown[: failed.index(True) + 1] if any(failed) else shown, None  # that is the end


_PYTHONS = (DropPush, MemberJoined)
"""Instructions that Python follows alone; so it does `Finish`, where members are lost."""


def _shown(told: Any) -> Any:
    """An instruction as far as both machines say it."""
    if type(told) is SendSquares:
        return told._replace(squares=())
    if type(told) is UpdateSlice:
        return told._replace(counted=tuple(range(len(told.counted or ()))))
    return told._replace(rank=-1) if type(told) in (AnswerJoin, MemberLeft) else told


class Both:
    """Tells both machines the same, and keeps what of it they have not been told of again."""

    def __init__(self, core: Any, native: Any) -> None:
        self.core = core
        self.native = native
        self.under_way: list[SendFrame] = []
        self.sent: list[SendFrame] = []
        self.updating: list[UpdateSlice] = []
        self.events = 0
        self.has_failed = False

    def tell(self, event: Any) -> None:
        told, error = outcome(self.core, event)
        found = outcome(self.native, event)
        assert found == (told, error), (event, found, (told, error))
        self.events += error is None
        self.has_failed |= any(type(each) is FailSession for each in told)
        self.under_way += [each for each in told if type(each) is SendFrame]
        self.updating += [each for each in told if type(each) is UpdateSlice]

    def frame_sent(self, frame: SendFrame) -> None:
        self.under_way.remove(frame)
        self.sent.append(frame)
        self.tell(FrameSent(frame.peer))


def message(draw: Callable[[Any], Any], peers: int) -> MessageReady:
    peer, priority = draw(st.integers(0, peers - 1)), draw(st.integers(-1, 2))
    return MessageReady(peer, Kind.BLOB, draw(st.integers(0, 3)), priority, 0, NO_TOKEN, 0)


# The worker.
@st.composite
def workers(draw: Any) -> tuple[Both, list[Slice], int, int, dict[str, Any]]:
    parameters, servers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    owners = draw(
        st.lists(st.tuples(st.integers(0, parameters - 1), st.integers(0, servers - 1)), max_size=8)
    )
    slices = [Slice(n, *of) for n, of in enumerate((p, 0, 1, s) for p, s in sorted(owners))]
    order, reply = draw(ORDERS), draw(REPLIES)
    about: dict[str, Any] = {
        "parameters": parameters,
        "order": order,
        "reply": reply,
        "turns": draw(TURNS),
        "outlives": reply == "broadcast" and draw(st.booleans()),
        "packs": draw(st.sampled_from([[], [list(range(parameters))]])),
    }
    window: tuple[list[int], int, int] = ([], 0, 1)
    core_window = None
    if slices and (order, reply) == ("priority", "broadcast") and draw(st.booleans()):
        window = ([3] * len(slices), draw(st.integers(0, 12)), servers)
        core_window = PushWindow(window[0], window[1], servers=servers)
    core = WorkerMachine(slices, window=core_window, **about)
    return (
        Both(core, NativeWorker(slices, window=window, **about)),
        slices,
        parameters,
        servers,
        about,
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(workers(), st.data())
def test_workers_decide_alike(
    made: tuple[Both, list[Slice], int, int, dict[str, Any]], data: Any
) -> None:
    both, slices, parameters, servers, about = made
    draw = data.draw
    step = 1
    numbers = st.integers(-1, len(slices))

    def answer() -> None:
        """Of what has left, or of anything."""
        kinds = (Kind.PULL,) if about["reply"] == "notify" else (Kind.PUSH, Kind.PULL)
        left = [frame for frame in both.sent if frame.kind in kinds]
        flags = draw(st.sampled_from([0, 0, Flag.UNCHANGED]))
        if left and draw(st.integers(0, 9)):
            frame = draw(st.sampled_from(left))
            both.tell(ReplyArrived(frame.slice, frame.step, frame.peer, 0, flags))
            if about["reply"] == "notify" or draw(st.booleans()):
                both.sent.remove(frame)
        else:
            server = draw(st.integers(0, servers - 1))
            both.tell(ReplyArrived(draw(numbers), draw(st.integers(0, 3)), server, 0, flags))

    def announce() -> None:
        left = [frame for frame in both.sent if frame.kind == Kind.PUSH]
        flags = draw(st.sampled_from([0, 0, Flag.UNCHANGED]))
        if left and draw(st.integers(0, 9)):
            frame = draw(st.sampled_from(left))
            both.sent.remove(frame)
            both.tell(NotifyArrived(frame.slice, frame.step, frame.peer, flags))
        else:
            both.tell(NotifyArrived(draw(numbers), 1, draw(st.integers(0, servers - 1)), flags))

    def gradient() -> None:
        flags = int(draw(st.sampled_from(FLAGS))) | draw(st.sampled_from([0, 0, 1])) << ROUND_SHIFT
        both.tell(
            GradientReady(draw(st.integers(0, parameters - 1)), step, flags, draw(st.booleans()))
        )

    def some_frame_sent() -> None:
        if both.under_way:
            both.frame_sent(draw(st.sampled_from(both.under_way)))

    def lose() -> None:
        if about["outlives"] and slices:
            some = draw(st.sets(st.sampled_from(range(len(slices))), max_size=4))
            owners = {each: draw(st.integers(0, servers - 1)) for each in some}
            both.tell(SlicesLost(draw(st.sampled_from([None, *range(servers)])), owners))

    def go_on() -> None:
        if about["outlives"] and slices:
            some = draw(st.sets(st.sampled_from(range(len(slices))), max_size=4))
            at = st.tuples(st.integers(0, 3), st.integers(0, 1))
            both.tell(SlicesGoOn({each: draw(at) for each in some}))

    usual = [gradient, gradient, some_frame_sent, some_frame_sent, answer, answer]
    seldom: list[Callable[[], None]] = [
        announce,
        lambda: both.tell(message(draw, servers)),
        lambda: both.tell(PullsDue()),
        lambda: both.tell(PrioritiesLearned(tuple(draw(st.permutations(range(parameters)))))),
        lambda: both.tell(PrioritiesLearned((0, 0))),
        lambda: both.tell(ValuesOffered()),
        lambda: both.tell(ValuesAwaited(draw(st.integers(0, 2)))),
        lambda: both.tell(CameAfter(draw(st.integers(0, 2)))),
    ]
    if about["reply"] == "notify":
        usual += [announce] * 2
    if about["outlives"]:
        usual += [lose, go_on]
    for _ in range(draw(st.integers(0, 60))):
        step += draw(st.integers(0, 7)) == 0
        draw(st.sampled_from([*usual * 3, *seldom]))()
        check(both, len(slices), parameters, outlives=about["outlives"])
    both.tell(Closing())
    while both.under_way:
        both.frame_sent(both.under_way[0])


def check(both: Both, slices: int, parameters: int, *, outlives: bool) -> None:
    core, native = both.core, both.native
    assert native.counts() == (core.queue_depth, core.most_queued, core.awaited)
    for parameter in range(parameters):
        assert native.is_complete(parameter) == core.is_complete(parameter)
    for slice_ in range(slices if outlives else 0):
        unchanged = core.was_unchanged(slice_)
        assert native.about(slice_) == (core.owner_of(slice_), *core.claim(slice_), unchanged)


# The server.
NAMES = ["bias", "weight", "fc.weight"]
SERVER = 1


@st.composite
def servers_(draw: Any) -> tuple[Both, int, list[int], str]:
    workers = draw(st.integers(1, 3))
    owners = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=6))
    slices = [Slice(n, *of) for n, of in enumerate((p, 0, 1, s) for p, s in sorted(owners))]
    about: dict[str, Any] = {
        "index": SERVER,
        "workers": workers,
        "order": draw(ORDERS),
        "reply": draw(REPLIES),
        "names": NAMES,
        "turns": draw(TURNS),
    }
    both = Both(ServerMachine(slices, closing=AllMembers, **about), NativeServer(slices, **about))
    own = [piece.number for piece in slices if piece.server == SERVER]
    return both, workers, own, about["reply"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(servers_(), st.data())
def test_servers_decide_alike(made: tuple[Both, int, list[int], str], data: Any) -> None:
    both, workers, own, reply = made
    draw = data.draw
    slices = st.sampled_from([*own * 4, 0, 99])
    anyone = st.sampled_from([*[*range(workers)] * 4, workers])
    pushed: dict[int, set[int]] = {}  # by slice, who has pushed its open round
    at = dict.fromkeys([*own, 0, 99], 1)
    flags_of: dict[int, int] = {}

    def push() -> None:
        slice_ = draw(slices)
        missing = sorted({*range(workers)} - pushed.setdefault(slice_, set()))
        regular = missing and draw(st.integers(0, 14))
        rank = draw(st.sampled_from(missing)) if regular else draw(anyone)
        step = at[slice_] if regular else draw(st.integers(0, 3))
        usual = flags_of.setdefault(slice_, int(draw(st.sampled_from(FLAGS))))
        flags = usual if draw(st.integers(0, 9)) else int(draw(st.sampled_from(FLAGS)))
        before = both.events
        priority = draw(st.integers(0, 2))
        both.tell(PushArrived(rank, slice_, step, priority, flags))
        if both.events > before:
            pushed[slice_].add(rank)

    def update() -> None:
        if not both.updating:
            both.tell(SliceUpdated())  # nobody has started one
            return
        due = both.updating.pop(0)
        both.tell(SliceUpdated((ZERO,) if due.measure else ()))
        pushed.pop(due.slice, None)
        flags_of.pop(due.slice, None)
        at[due.slice] += 1

    def pull() -> None:
        slice_ = draw(slices)
        step = max(0, at[slice_] - draw(st.integers(0, 1)))
        both.tell(PullArrived(draw(anyone), slice_, step, draw(st.integers(0, 2))))

    def value() -> None:
        rank = draw(st.sampled_from([0, 0, 0, workers - 1]))
        slice_ = draw(slices)
        both.tell(ValueArrived(rank, slice_, draw(st.integers(0, at[slice_])), 1))

    def some_frame_sent() -> None:
        if both.under_way:
            both.frame_sent(draw(st.sampled_from(both.under_way)))

    usual = [push, push, push, push, update, some_frame_sent, some_frame_sent, value]
    seldom: list[Callable[[], None]] = [
        pull,
        lambda: both.tell(message(draw, workers)),
        lambda: draw(st.integers(0, 5)) or both.tell(PeerLeft(draw(st.integers(0, workers - 1)))),
    ]
    if reply != "broadcast":
        usual += [pull, pull]
    for number in range(draw(st.integers(0, 60))):
        if number == 0 and draw(st.booleans()):
            for slice_ in own:
                both.tell(ValueArrived(0, slice_, 0, 1))
        draw(st.sampled_from([*usual * 3, *seldom]))()
        assert library().fp_server_depth(both.native._machine) == both.core.queue_depth
    while both.under_way:
        both.frame_sent(both.under_way[0])
    for rank in range(workers):
        both.tell(PeerLeft(rank))


class Answering(FirstMembers):
    """Its answers leave by the machine's lanes, as the plane's do."""

    binds = False


@st.composite
def elastic_servers(draw: Any) -> tuple[Both, Members, list[Slice]]:
    workers = draw(st.integers(2, 4))
    members = Members(workers, started=draw(st.integers(1, workers)))
    slices = [Slice(n, 0, 0, 1, SERVER if n < 4 else 0) for n in range(6)]
    about: dict[str, Any] = {
        "index": SERVER,
        "workers": workers,
        "order": draw(ORDERS),
        "reply": "broadcast",
        "names": ["bias"],
        "turns": draw(TURNS),
    }
    closing = partial(Answering, members=members, has_values=False)
    core: Any = ServerMachine(slices, closing=closing, **about)
    native = NativeServer(slices, started=len(members.started), **about)
    return Both(core, native), members, slices


@settings(max_examples=EXAMPLES, deadline=None)
@given(elastic_servers(), st.data())
def test_elastic_servers_decide_alike(made: tuple[Both, Members, list[Slice]], data: Any) -> None:
    both, members, slices = made
    draw, core, workers = data.draw, both.core, members.workers
    anyone, states = st.integers(0, workers - 1), core._states
    usual_flags = int(draw(st.sampled_from([Flag.GRADIENT, Flag.NO_GRADIENT | Flag.GRADIENT])))

    def push() -> None:
        slice_ = draw(st.sampled_from(sorted(states)))
        state, rank = states[slice_], draw(anyone)
        step = max(state.oldest[0], state.done_step + 1, 1)
        behind = [each for each in members.here if state.last[each][0] < step]
        if draw(st.integers(0, 9)) and behind:  # who can, and somewhere to go
            rank = draw(st.sampled_from(behind))
        elif draw(st.booleans()):
            step = draw(st.integers(1, 6))
        is_past = (step, 0) <= state.done or state.updating == step
        if (is_past and rank in members.here) or rank in members.promised:
            return  # the plane refuses that, and Python answers it
        flags = usual_flags if draw(st.integers(0, 19)) else int(draw(st.sampled_from(FLAGS[:-1])))
        both.tell(PushArrived(rank, slice_, step, draw(st.integers(0, 2)), flags))

    def update() -> None:
        if both.updating:
            both.updating.pop(0)
            both.tell(SliceUpdated())

    def some_frame_sent() -> None:
        if both.under_way:
            both.frame_sent(draw(st.sampled_from(both.under_way)))

    def drop() -> None:
        rank = draw(anyone)
        if rank in members.here and core.can_spare(rank):
            both.tell(PeerDropped(rank))

    def ask() -> None:
        rank = draw(anyone)
        if rank not in members.here or rank in members.promised:
            newest = max(max(each.done_step, each.updating) for each in states.values())
            both.tell(JoinAsked(rank, newest + draw(st.integers(1, 4))))

    def settle() -> None:
        if members.promised:
            rank, step = draw(st.sampled_from(sorted(members.promised.items())))
            both.tell(JoinSettled(rank, step, 0))

    def take_over() -> None:
        if len(states) < len(slices):
            piece = slices[len(states)]
            after = (draw(st.integers(0, 3)), draw(st.integers(0, 1)))
            both.tell(SlicesSettled((piece,), {piece.number: after}))

    for number in range(4):
        both.tell(ValueArrived(0, number, 0, 1))
    usual = [push, push, push, push, push, update, update, some_frame_sent, some_frame_sent]
    seldom: list[Callable[[], None]] = [
        *[drop, ask, ask, settle, settle, take_over],
        lambda: both.tell(message(draw, workers)),
        lambda: draw(st.integers(0, 9)) or both.tell(PeerLeft(draw(anyone))),
    ]
    for _ in range(draw(st.integers(0, 80))):
        draw(st.sampled_from([*usual * 3, *seldom]))()
        if both.has_failed:
            return
        assert library().fp_server_depth(both.native._machine) == core.queue_depth
        for rank in range(workers):
            sent = library().fp_server_has_sent_all(both.native._machine, rank)
            assert sent == core.has_sent_all(rank)
    while both.under_way:
        both.frame_sent(both.under_way[0])


@settings(max_examples=50, deadline=None)
@given(
    st.integers(4, 1 << 28),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 2**31)), max_size=40),
)
def test_bounds_adapt_alike(most_bytes: int, pairs: list[tuple[int, int]]) -> None:
    core, found = SendBound(most_bytes), []
    for pair in pairs:
        core.observe(*pair)
        found.append(core.bytes)
    flat = (ctypes.c_uint32 * (2 * len(pairs)))(*(each for pair in pairs for each in pair))
    native = (ctypes.c_int * len(pairs))()
    library().fp_send_bound(most_bytes, flat, len(pairs), native)
    assert list(native) == found


def test_a_machine_that_differs_is_seen() -> None:
    """What the comparison is worth: one with another turn is told apart."""
    slices = [Slice(0, 0, 0, 1, 0), Slice(1, 1, 0, 1, 1)]
    about: dict[str, Any] = {"parameters": 2, "order": "priority", "reply": "broadcast"}
    both = Both(
        WorkerMachine(slices, turns=Turns(at_once=1), **about),
        NativeWorker(slices, turns=Turns(at_once=2), **about),
    )
    both.tell(GradientReady(0, 1))
    with pytest.raises(AssertionError):
        both.tell(GradientReady(1, 1))

"""``compression="auto"``: for each parameter the least lossy codec with which it is back in time.

Theory of operation. A parameter's bytes may pass from when its gradient is ready until the next
forward pass uses it. What is used sooner has its gradient later, so these windows are nested: the
window of parameter k contains those of 1..k-1. Links that send the most urgent first therefore keep
every deadline exactly if, for each k, what parameters 1..k put on the busiest resource fits into
window k (Horn 1974, earliest deadline first: preemptive, on one machine with release times).
All windows may be longer by what the step is allowed to be longer than its compute.

Where parameters 1..k do not fit, one of them is *raised* to a codec with fewer bytes: by the raise
that saves most seconds per loss, and of equal ones the smallest that is enough. In the end raises
that are not needed are taken back. A codec that keeps processors busy for longer than it spares the
link is no raise.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import NamedTuple, TypeVar

from foreprop.core.codec import NONE, kind_of
from foreprop.core.codecfacts import LOSSLESS, Coded, KnownCodec, codec_named
from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError

TOLERANCE = 0.04
"""How much longer a predicted step may be than the compute before anything is made less exact. Real
ones are up to 0.01 longer than predicted, and are to be within 0.05."""
MOST_CORES = 4
"""How many threads of a process encode or decode at once: one for each peer."""
_ROUNDING_S = 1e-12
_ABOUT_S = 1e-9  # more than sums in another order differ by
_PACES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Shares of the links' rate to count on: what is urgent waits for less on idle links."""
_WORTHWHILE = 1 / 1.02
"""The share of the exact step that a choice must be below to be worth its loss."""
_AS_QUICK = 1.01


class Need(NamedTuple):
    """A parameter, in the order of first use, and when its bytes may pass.

    Its gradient is ready at ``ready_s`` after the backward pass began; the next forward pass uses
    it at ``needed_s``, on the same clock, if nothing is waited for.
    """

    elems: int
    ready_s: float
    needed_s: float
    stays_exact: bool = False
    """Only exact codecs may be taken, as for biases and norms: they are small, and need it most."""
    lossless_share: float | None = None
    """The share of its bytes that the lossless codec keeps, if that was measured."""

    def own(self, codec: KnownCodec) -> KnownCodec:
        """The codec with what was measured of this parameter."""
        if self.lossless_share is None or kind_of(codec.name) != LOSSLESS:
            return codec
        return codec_named(f"{LOSSLESS}:{min(1.0, max(1e-4, self.lossless_share)):.4f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """The links that a step's bytes pass, and the cores that encode them. Raises `ConfigError`.

    A node is a machine with workers, which push once together. ``rate_bytes_per_s`` is what its
    link carries each way, without the headers of packets; without ``dedicated_servers`` there is
    one server beside the workers of each node. ``cpu`` is how many times as fast as the table's
    (`core.codecfacts`) a core is, and ``cores`` how many of a machine encode and decode at once.
    """

    rate_bytes_per_s: float
    nodes: int
    dedicated_servers: int = 0
    server_rate_bytes_per_s: float | None = None
    """What a dedicated server's link carries, if that is another rate."""
    slice_elems: int
    round_trip_s: float = 0.0
    """The time from a gradient's last byte to its new values, without the links' time."""
    cpu: float = 1.0
    cores: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_bytes_per_s", "server_rate_bytes_per_s", "cpu", "cores"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be positive and finite")
        least_of = {"nodes": 1, "dedicated_servers": 0, "slice_elems": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least {least}")

    def slowed(self, pace: float) -> Carriers:
        server_rate = self.server_rate_bytes_per_s
        return replace(
            self,
            rate_bytes_per_s=pace * self.rate_bytes_per_s,
            server_rate_bytes_per_s=None if server_rate is None else pace * server_rate,
        )

    def load_s(self, elems: int, codec: KnownCodec) -> float:
        """How long so many elements keep the busiest resource busy in a step."""
        whole, rest = divmod(elems, self.slice_elems)
        full = codec.coded(self.slice_elems, ranks=self.nodes, cpu=self.cpu)
        last = codec.coded(rest, ranks=self.nodes, cpu=self.cpu)
        slices = whole + bool(rest)
        push_bytes = whole * full.push_bytes + last.push_bytes + slices * HEADER_BYTES
        reply_bytes = whole * full.reply_bytes + last.reply_bytes + slices * HEADER_BYTES
        work = Coded(
            push_bytes,
            reply_bytes,
            whole * full.encode_s + last.encode_s,
            whole * full.decode_s + last.decode_s,
        )
        # workers encode all gradients and decode all replies; servers decode all workers' pushes
        worker_s = work.encode_s + work.decode_s
        servers = self.dedicated_servers or self.nodes
        server_s = (self.nodes * work.decode_s + work.encode_s) / servers
        cpu_s = max(worker_s, server_s) if self.dedicated_servers else worker_s + server_s
        return max(self._link_s(work), cpu_s / self.cores)

    def _link_s(self, work: Coded) -> float:
        # links are full duplex; with servers beside workers, pushes and replies share each way
        if not self.dedicated_servers:
            others = (self.nodes - 1) / self.nodes
            return others * (work.push_bytes + work.reply_bytes) / self.rate_bytes_per_s
        most_bytes = max(work.push_bytes, work.reply_bytes)
        server_rate = self.server_rate_bytes_per_s or self.rate_bytes_per_s
        server_s = self.nodes * most_bytes / self.dedicated_servers / server_rate
        return max(most_bytes / self.rate_bytes_per_s, server_s)


class Enough(NamedTuple):
    """A codec for each parameter, and the step that the windows alone allow with them."""

    codecs: tuple[KnownCodec, ...]
    step_s: float
    compute_s: float
    elems: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        return all(codec.facts.exact for codec in self.codecs)

    @property
    def loss(self) -> float:
        pairs = zip(self.codecs, self.elems, strict=True)
        return sum(codec.loss * elems for codec, elems in pairs) / max(1, sum(self.elems))

    @property
    def sentence(self) -> str:
        """Like ``31% of the bytes in int8, the rest exact; step 0.182 s, 0.99 of it compute``."""
        busy = self.compute_s / self.step_s if self.step_s else 1.0
        shares = shares_text(self.codecs, self.elems)
        return f"{shares}; step {self.step_s:.3f} s, {busy:.2f} of it compute"


def shares_text(codecs: Sequence[KnownCodec], elems: Sequence[int]) -> str:
    """The share of the model's bytes that each codec has, in words; raw bytes are not named."""
    count: Counter[str] = Counter()
    loss: dict[str, float] = {}
    of_one_name = len({codec.name for codec in codecs}) == 1
    for codec, size in zip(codecs, elems, strict=True):
        # the share that a lossless codec keeps, which its name may have, differs by array
        name = codec.name if of_one_name else codec.session_name
        count[name] += size
        loss[name] = codec.loss
    coded = sorted((name for name in count if name != NONE), key=lambda name: -loss[name])
    if not coded:
        return "all of the bytes as they are"
    whole = max(1, sum(elems))
    parts = []
    for name in coded:
        share = count[name] / whole
        # never rounded to nothing or to all
        percent = "less than 1%" if share < 0.01 else f"{min(share, 0.99):.0%}"
        parts.append(f"{'all' if share == 1 else percent} of the bytes in {name}")
    if all(codec.facts.exact for codec in codecs):
        return ", ".join(parts) + ", which is exact"
    rest = sum(count.values()) > sum(count[name] for name in coded)
    return ", ".join(parts) + ", the rest exact" * rest


def just_enough(
    needs: Sequence[Need], carriers: Carriers, allowed: Sequence[KnownCodec], *, compute_s: float
) -> Enough:
    """The least lossy codec of ``allowed`` for each parameter with which all are back in time.

    ``allowed`` is in the order of loss, and the first one is exact. In time means that the step
    takes no longer than the compute and `TOLERANCE` of it; or, if no choice is so quick, than the
    quickest one. Raises `ConfigError` for an empty or unordered ``allowed`` and for parameters that
    are not in the order of first use.
    """
    _check(needs, allowed)
    choice = _Choice(needs, carriers, allowed)
    allowance_s = max(TOLERANCE * compute_s, choice.least_excess_s())
    for last in range(len(needs)):
        choice.make_fit(last, allowance_s)
    choice.take_back(allowance_s)
    return Enough(
        choice.codecs,
        compute_s + max(0.0, choice.excess_s()),
        compute_s,
        tuple(need.elems for need in needs),
    )


def checked_enough(
    needs: Sequence[Need],
    carriers: Carriers,
    allowed: Sequence[KnownCodec],
    *,
    compute_s: float,
    step_s: Callable[[Sequence[KnownCodec]], float],
    tolerance: float = TOLERANCE,
) -> Enough:
    """`just_enough`, checked by ``step_s``: a model or a simulation that knows queues.

    If ``step_s`` finds a step too long, the choice is made again as for slower links. If all are
    too long, one codec for all is tried, too, and the least lossy of the quickest is taken. All
    stays exact where exact steps are within ``tolerance`` of the compute, or hardly longer than the
    best choice's. The result has the step that ``step_s`` gives.
    """
    elems = tuple(need.elems for need in needs)
    exact = tuple(allowed[:1]) * len(needs)
    tried: list[Enough] = []
    for codecs in chain([exact], _choices(needs, carriers, allowed, compute_s)):
        if all(codecs != each.codecs for each in tried):
            tried.append(Enough(codecs, step_s(codecs), compute_s, elems))
        if tried[-1].step_s <= (1 + tolerance) * compute_s:
            return tried[-1]
    # the least lossy of the quickest, if it is worth it; the first is exact
    quickest_s = min(each.step_s for each in tried)
    if quickest_s > _WORTHWHILE * tried[0].step_s:
        return tried[0]
    return min((e for e in tried if e.step_s <= _AS_QUICK * quickest_s), key=lambda e: e.loss)


def _choices(
    needs: Sequence[Need], carriers: Carriers, allowed: Sequence[KnownCodec], compute_s: float
) -> Iterator[tuple[KnownCodec, ...]]:
    for pace in _PACES:
        yield just_enough(needs, carriers.slowed(pace), allowed, compute_s=compute_s).codecs
    for codec in allowed[1:]:  # windows know nothing of queues
        yield tuple(
            need.own(codec if codec.facts.exact or not need.stays_exact else allowed[0])
            for need in needs
        )


def _check(needs: Sequence[Need], allowed: Sequence[KnownCodec]) -> None:
    if not allowed or not allowed[0].facts.exact:
        raise ConfigError(
            f"allowed is {[codec.name for codec in allowed]}; it must begin with an exact codec"
        )
    losses = [codec.loss for codec in allowed]
    if losses != sorted(losses):
        raise ConfigError(
            f"allowed is {[codec.name for codec in allowed]}; it must be in the order of loss"
        )
    uses = [need.needed_s for need in needs]
    if uses != sorted(uses):
        raise ConfigError("needs are not in the order of first use: needed_s must not fall")


# Which parameter to raise next: the one that saves most seconds per loss.
AS_GOOD = 0.5
"""Raises that save at least this share of the best one's seconds per loss are as good."""
_ENDLESS = 1 << 20  # the octave of a raise that loses nothing

T = TypeVar("T", "Raise", float)


class Raise(NamedTuple):
    """A codec with fewer bytes for a parameter; ``level`` is its place among those allowed.

    Raises are in the order of what they save; of equal ones the later parameter comes first.
    """

    saved_s: float
    minus_parameter: int
    level: int
    per_loss: float

    @property
    def parameter(self) -> int:
        return -self.minus_parameter


_saved_s = operator.attrgetter("saved_s")


class Raises:
    """The raises that are possible now. Not thread-safe.

    They are kept by the octave of what they save per loss, and in each octave by the seconds that
    they save. Those at least half as good as the best one are then all of its octave, and some of
    the octave below. So the next one is found at once among thousands of parameters.
    """

    def __init__(self) -> None:
        self._octaves: dict[int, list[Raise]] = {}
        self._worths: dict[int, list[float]] = {}  # seconds per loss, rising, by octave
        self._own: dict[int, list[Raise]] = {}  # by parameter

    def put(self, parameter: int, levels: Iterable[tuple[int, float, float]]) -> None:
        """Set the parameter's raises: level, seconds saved, and seconds saved per loss."""
        for each in self._own.pop(parameter, ()):
            octave = _octave_of(each)
            _remove(self._octaves, octave, each)
            _remove(self._worths, octave, each.per_loss)
        self._own[parameter] = own = [
            Raise(saved_s, -parameter, level, per_loss) for level, saved_s, per_loss in levels
        ]
        for each in own:
            octave = _octave_of(each)
            insort(self._octaves.setdefault(octave, []), each)
            insort(self._worths.setdefault(octave, []), each.per_loss)

    def maybe_best(self, missing_s: float) -> Raise | None:
        """The smallest raise that is enough, or else the largest, of those as good as the best."""
        if not self._octaves:
            return None
        octave = max(self._octaves)
        least = AS_GOOD * self._worths[octave][-1]
        lower = self._octaves.get(octave - 1, [])
        both = [self._octaves[octave], lower]
        enough = [each for kept in both for each in _smallest(kept, missing_s, least)]
        if enough:
            return min(enough)
        largest = [each for kept in both for each in _largest(kept, least)]
        return max(largest, key=lambda each: (each.saved_s, each.parameter))


def _octave_of(each: Raise) -> int:
    return _ENDLESS if each.per_loss == math.inf else math.frexp(each.per_loss)[1]


def _remove(by_octave: dict[int, list[T]], octave: int, value: T) -> None:
    kept = by_octave[octave]
    del kept[bisect_left(kept, value)]
    if not kept:
        del by_octave[octave]


def _smallest(kept: list[Raise], missing_s: float, least: float) -> list[Raise]:
    """The first raise that saves so much and is good enough, if there is one."""
    for place in range(bisect_left(kept, missing_s, key=_saved_s), len(kept)):
        if kept[place].per_loss >= least:
            return [kept[place]]
    return []


def _largest(kept: list[Raise], least: float) -> list[Raise]:
    """The good enough raise that saves most, of equal ones the latest parameter's, if any."""
    end = len(kept)
    while end:
        start = bisect_left(kept, kept[end - 1].saved_s, key=_saved_s)
        for place in range(start, end):
            if kept[place].per_loss >= least:
                return [kept[place]]
        end = start
    return []


class _Choice:
    """The codecs of all parameters while they are chosen; all begin with the exact one.

    A parameter's *level* is the place of its codec in ``allowed``, and its *load* how long that
    codec keeps the busiest resource busy.
    """

    def __init__(
        self, needs: Sequence[Need], carriers: Carriers, allowed: Sequence[KnownCodec]
    ) -> None:
        self._needs = needs
        self._allowed = allowed
        self._levels = [0] * len(needs)
        self._raises = Raises()
        self._own = [[need.own(codec) for codec in allowed] for need in needs]
        pairs = zip(needs, self._own, strict=True)
        self._load_s = [[carriers.load_s(n.elems, codec) for codec in own] for n, own in pairs]
        self._now_s = [loads[0] for loads in self._load_s]
        exact = sum(codec.facts.exact for codec in allowed)
        self._useful: list[list[int]] = []
        """The levels, by parameter, with less load than all before: a lossier one must spare."""
        for need, loads in zip(needs, self._load_s, strict=True):
            possible = loads[: exact if need.stays_exact else len(loads)]
            least = [math.inf, *accumulate(possible, min)]
            self._useful.append([at for at, load_s in enumerate(possible) if load_s < least[at]])
        # nested, if gradients do not come in the order of use: no window begins before a later one
        ready = list(accumulate((need.ready_s for need in reversed(needs)), max))[::-1]
        trip_s = carriers.round_trip_s
        self._window_s = [n.needed_s - at_s - trip_s for n, at_s in zip(needs, ready, strict=True)]

    @property
    def codecs(self) -> tuple[KnownCodec, ...]:
        return tuple(own[level] for own, level in zip(self._own, self._levels, strict=True))

    def excess_s(self) -> float:
        """How much longer the step is than the compute."""
        return self._excess_of(self._now_s)

    def least_excess_s(self) -> float:
        """The excess with each parameter's least load."""
        pairs = zip(self._load_s, self._useful, strict=True)
        return self._excess_of([loads[useful[-1]] for loads, useful in pairs])

    def _excess_of(self, loads_s: Sequence[float], first: int = 0) -> float:
        """The excess of the windows of parameters ``first`` and later."""
        excess = map(operator.sub, accumulate(loads_s), self._window_s)
        return max(islice(excess, first, None), default=0.0)

    def make_fit(self, last: int, allowance_s: float) -> None:
        """Raise some of parameters 0..last until these fit into the window of the last one.

        It is called for each parameter in turn.
        """
        self._find_raises(last)
        while True:
            missing_s = sum(self._now_s[: last + 1]) - self._window_s[last] - allowance_s
            if missing_s <= _ROUNDING_S:
                return
            best = self._raises.maybe_best(missing_s)
            if best is None:
                return  # it fits but for rounding: the allowance is at least the least excess
            self._set(best.parameter, best.level)
            self._find_raises(best.parameter)

    def _set(self, parameter: int, level: int) -> None:
        self._levels[parameter] = level
        self._now_s[parameter] = self._load_s[parameter][level]

    def _find_raises(self, parameter: int) -> None:
        now, loads = self._levels[parameter], self._load_s[parameter]
        levels: list[tuple[int, float, float]] = []
        for level in self._useful[parameter]:
            if level > now:
                lost = self._allowed[level].loss - self._allowed[now].loss
                lost *= self._needs[parameter].elems
                saved_s = loads[now] - loads[level]
                levels.append((level, saved_s, saved_s / lost if lost > 0 else math.inf))
        self._raises.put(parameter, levels)

    def take_back(self, allowance_s: float) -> None:
        """Undo the raises that are not needed, those that lose most first."""
        order = sorted(
            range(len(self._levels)),
            key=lambda p: (-self._allowed[self._levels[p]].loss * self._needs[p].elems, p),
        )
        for parameter in order:
            chosen = self._levels[parameter]
            if not chosen:
                continue
            most_s, loads = allowance_s + _ROUNDING_S, self._load_s[parameter]
            later_s = self._excess_of(self._now_s, parameter)
            for level in self._useful[parameter]:  # the least lossy with which the step is in time
                self._set(parameter, level)
                about_s = later_s + loads[level] - loads[chosen]
                if level == chosen or (about_s <= most_s + _ABOUT_S and self.excess_s() <= most_s):
                    break

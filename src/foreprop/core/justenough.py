"""The least lossy codec for each parameter with which it is back in time: ``compression="auto"``.

Theory of operation. A parameter's bytes may pass from when its gradient is ready until the next
forward pass uses it. What is used sooner has its gradient later, so these windows are nested: that
of parameter k has those of 1..k-1 inside. Links that send the most urgent first therefore keep
every deadline exactly if, for each k, what parameters 1..k put on the busiest resource fits into
window k (Horn 1974, earliest deadline first: preemptive, on one machine with release times).
All windows may be longer by what the step is allowed to be longer than its compute.

Where parameters 1..k do not fit, one of them is raised to a codec with fewer bytes: that which buys
most seconds per loss, and of equals the smallest that is enough. In the end whatever raise is not
needed is taken back. Codecs that would keep processors busier than they spare the link are no
raise.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import NamedTuple

from foreprop.core.codec import NONE, kind_of
from foreprop.core.codecfacts import LOSSLESS, Coded, KnownCodec, codec_named
from foreprop.core.raises import Raises
from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError

TOLERANCE = 0.04
"""Of the compute: so much longer a predicted step may be before anything is made less exact. Real
ones are up to 0.01 longer than predicted, and are to be within 0.05."""
MOST_CORES = 4
"""Threads that encode or decode at once in a process, one for each peer."""
_ROUNDING_S = 1e-12
_ABOUT_S = 1e-9
"""By which sums in another order may differ, and more."""
_PACES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Of the links' rate what is counted on: what is urgent waits behind less on links that idle."""
_WORTHWHILE = 1 / 1.02
"""Of the exact step: a choice with steps no shorter than that is not worth its loss."""
_AS_QUICK = 1.01


class Need(NamedTuple):
    """A parameter, in the order of first use, and when its bytes may pass."""

    elems: int
    ready_s: float
    """When its gradient is there, since the backward pass began."""
    needed_s: float
    """When the next forward pass uses it if nothing is waited for, on the same clock."""
    stays_exact: bool = False
    """Only exact codecs may be taken, as for biases and norms: they are small, and need it most."""
    lossless_share: float | None = None
    """What the exact codec has left of its bytes, if that was measured."""

    def own(self, codec: KnownCodec) -> KnownCodec:
        """The codec as it is for this parameter."""
        if self.lossless_share is None or kind_of(codec.name) != LOSSLESS:
            return codec
        return codec_named(f"{LOSSLESS}:{min(1.0, max(1e-4, self.lossless_share)):.4f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """What the bytes of a step pass, and what encodes them. Raises `ConfigError`."""

    rate_bytes_per_s: float
    """Of each node's link, each way, headers of packets taken off."""
    nodes: int
    """Machines with workers, whose pushes are one each."""
    dedicated_servers: int = 0
    """0: a server beside the workers of each node."""
    server_rate_bytes_per_s: float | None = None
    """Of a dedicated server's link, if it is another one."""
    slice_elems: int
    round_trip_s: float = 0.0
    """From the last byte of a gradient to its new values, links' time left out."""
    cpu: float = 1.0
    """How many times as fast as the table's (`core.codecfacts`) a core is."""
    cores: float = 1.0
    """That may encode and decode at once, of each machine."""

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
        """With links of this share of the rate."""
        server_rate = self.server_rate_bytes_per_s
        return replace(
            self,
            rate_bytes_per_s=pace * self.rate_bytes_per_s,
            server_rate_bytes_per_s=None if server_rate is None else pace * server_rate,
        )

    def load_s(self, elems: int, codec: KnownCodec) -> float:
        """How long a step keeps the busiest resource busy with so many elements."""
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
        return max(self._link_s(work), self._cpu_s(work) / self.cores)

    def _link_s(self, work: Coded) -> float:
        """Full duplex; beside workers pushes and replies share both directions."""
        if not self.dedicated_servers:
            others = (self.nodes - 1) / self.nodes
            return others * (work.push_bytes + work.reply_bytes) / self.rate_bytes_per_s
        most_bytes = max(work.push_bytes, work.reply_bytes)
        server_rate = self.server_rate_bytes_per_s or self.rate_bytes_per_s
        server_s = self.nodes * most_bytes / self.dedicated_servers / server_rate
        return max(most_bytes / self.rate_bytes_per_s, server_s)

    def _cpu_s(self, work: Coded) -> float:
        """Workers encode all gradients and decode all replies; servers decode what all push."""
        worker_s = work.encode_s + work.decode_s
        servers = self.dedicated_servers or self.nodes
        server_s = (self.nodes * work.decode_s + work.encode_s) / servers
        return max(worker_s, server_s) if self.dedicated_servers else worker_s + server_s


class Enough(NamedTuple):
    """A codec for each parameter, and the step that follows."""

    codecs: tuple[KnownCodec, ...]
    step_s: float
    """By the windows alone; at least the compute."""
    compute_s: float
    elems: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        return all(codec.facts.exact for codec in self.codecs)

    @property
    def loss(self) -> float:
        """Of an element, on average."""
        pairs = zip(self.codecs, self.elems, strict=True)
        return sum(codec.loss * elems for codec, elems in pairs) / max(1, sum(self.elems))

    @property
    def sentence(self) -> str:
        """As ``31% of the bytes in int8, the rest exact; step 0.182 s, 0.99 of it compute``."""
        busy = self.compute_s / self.step_s if self.step_s else 1.0
        shares = shares_text(self.codecs, self.elems)
        return f"{shares}; step {self.step_s:.3f} s, {busy:.2f} of it compute"


def shares_text(codecs: Sequence[KnownCodec], elems: Sequence[int]) -> str:
    """What share of the model's bytes goes by which codec; float32 as it is is not named."""
    count: Counter[str] = Counter()
    loss: dict[str, float] = {}
    of_one_name = len({codec.name for codec in codecs}) == 1
    for codec, size in zip(codecs, elems, strict=True):
        # what a lossless codec leaves differs by array
        name = codec.name if of_one_name else codec.session_name
        count[name] += size
        loss[name] = codec.loss
    coded = sorted((name for name in count if name != NONE), key=lambda name: -loss[name])
    if not coded:
        return "all of the bytes as they are"
    whole = max(1, sum(elems))
    parts = [f"{_percent(count[name] / whole)} of the bytes in {name}" for name in coded]
    if all(codec.facts.exact for codec in codecs):
        return ", ".join(parts) + ", which is exact"
    rest = sum(count.values()) > sum(count[name] for name in coded)
    return ", ".join(parts) + ", the rest exact" * rest


def _percent(share: float) -> str:
    """Not all, and not nothing, if it is not."""
    if share == 1:
        return "all"
    return "less than 1%" if share < 0.01 else f"{min(share, 0.99):.0%}"


def just_enough(
    needs: Sequence[Need],
    carriers: Carriers,
    allowed: Sequence[KnownCodec],
    *,
    compute_s: float,
    tolerance: float = TOLERANCE,
) -> Enough:
    """A codec of ``allowed`` for each parameter, the least lossy with which all are back in time.

    ``allowed`` in the order of loss, the first one exact. In time: the step takes no longer than
    the compute and ``tolerance`` of it; or, if no choice is so quick, than the quickest one.
    Raises `ConfigError` for an empty or unordered ``allowed`` and parameters out of order.
    """
    _check(needs, allowed)
    choice = _Choice(needs, carriers, allowed)
    allowance_s = max(tolerance * compute_s, choice.least_excess_s())
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
) -> Enough:
    """`just_enough` by the steps that ``step_s`` gives: a model or a simulation, with queues.

    If a step comes out too long, the choice is made again as for slower links. If all do, one codec
    for all is tried, too, and it is the least lossy of the quickest. All stays exact where
    exact steps are within `TOLERANCE` of the compute, or hardly longer than the best choice's. The
    result's step is ``step_s``'s.
    """
    elems = tuple(need.elems for need in needs)
    exact = tuple(allowed[:1]) * len(needs)
    tried: list[Enough] = []
    for codecs in chain([exact], _choices(needs, carriers, allowed, compute_s)):
        if all(codecs != each.codecs for each in tried):
            tried.append(Enough(codecs, step_s(codecs), compute_s, elems))
        if tried[-1].step_s <= (1 + TOLERANCE) * compute_s:
            return tried[-1]
    return _best(tried)


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


def _best(tried: Sequence[Enough]) -> Enough:
    """The least lossy of the quickest, if it is worth it; the first is exact."""
    quickest_s = min(each.step_s for each in tried)
    if quickest_s > _WORTHWHILE * tried[0].step_s:
        return tried[0]
    good = [each for each in tried if each.step_s <= _AS_QUICK * quickest_s]
    return min(good, key=lambda each: each.loss)


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


class _Choice:
    """Codecs so far, by parameter as the place in ``allowed``."""

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
        """Of the codecs so far."""
        exact = sum(codec.facts.exact for codec in allowed)
        self._useful = [
            _decreasing(loads[: exact if need.stays_exact else len(loads)])
            for need, loads in zip(needs, self._load_s, strict=True)
        ]
        # nested, if gradients do not come in the order of use: no window begins before a later one
        ready = list(accumulate((need.ready_s for need in reversed(needs)), max))[::-1]
        trip_s = carriers.round_trip_s
        self._window_s = [n.needed_s - at_s - trip_s for n, at_s in zip(needs, ready, strict=True)]

    @property
    def codecs(self) -> tuple[KnownCodec, ...]:
        return tuple(own[level] for own, level in zip(self._own, self._levels, strict=True))

    def excess_s(self) -> float:
        """By how much the step is longer than the compute."""
        return self._excess_of(self._now_s)

    def least_excess_s(self) -> float:
        """With the fewest seconds of each parameter."""
        pairs = zip(self._load_s, self._useful, strict=True)
        return self._excess_of([loads[useful[-1]] for loads, useful in pairs])

    def _excess_of(self, loads_s: Sequence[float], first: int = 0) -> float:
        """Of the windows of parameters ``first`` and later."""
        excess = map(operator.sub, accumulate(loads_s), self._window_s)
        return max(islice(excess, first, None), default=0.0)

    def make_fit(self, last: int, allowance_s: float) -> None:
        """Raise some of parameters 0..last until these fit into the window of the last one.

        Called for each of them in turn.
        """
        self._find_raises(last)
        while True:
            missing_s = sum(self._now_s[: last + 1]) - self._window_s[last] - allowance_s
            if missing_s <= _ROUNDING_S:
                return
            best = self._raises.maybe_best(missing_s)
            if best is None:
                return  # by rounding: what is least has been allowed
            self._set(best.parameter, best.level)
            self._find_raises(best.parameter)

    def _set(self, parameter: int, level: int) -> None:
        self._levels[parameter] = level
        self._now_s[parameter] = self._load_s[parameter][level]

    def _find_raises(self, parameter: int) -> None:
        now, loads = self._levels[parameter], self._load_s[parameter]
        higher = [level for level in self._useful[parameter] if level > now]
        saved_s = [loads[now] - loads[level] for level in higher]
        per_loss = [self._per_loss(parameter, level) for level in higher]
        self._raises.put(parameter, zip(higher, saved_s, per_loss, strict=True))

    def _per_loss(self, parameter: int, level: int) -> float:
        before, after = self._allowed[self._levels[parameter]], self._allowed[level]
        lost = (after.loss - before.loss) * self._needs[parameter].elems
        loads = self._load_s[parameter]
        saved_s = loads[self._levels[parameter]] - loads[level]
        return saved_s / lost if lost > 0 else math.inf

    def take_back(self, allowance_s: float) -> None:
        """The raises that are not needed, those that lose most first."""
        order = sorted(
            range(len(self._levels)),
            key=lambda p: (-self._allowed[self._levels[p]].loss * self._needs[p].elems, p),
        )
        for parameter in order:
            chosen = self._levels[parameter]
            if chosen:
                self._lower(parameter, chosen, allowance_s + _ROUNDING_S)

    def _lower(self, parameter: int, chosen: int, most_s: float) -> None:
        """To the least lossy level with which the step is longer by no more."""
        loads = self._load_s[parameter]
        later_s = self._excess_of(self._now_s, parameter)
        for level in self._useful[parameter]:
            self._set(parameter, level)
            about_s = later_s + loads[level] - loads[chosen]
            if level == chosen or (about_s <= most_s + _ABOUT_S and self.excess_s() <= most_s):
                return


def _decreasing(loads_s: Sequence[float]) -> list[int]:
    """The places that are less than all before: a lossier codec must spare something."""
    least = [math.inf, *accumulate(loads_s, min)]
    return [place for place, load_s in enumerate(loads_s) if load_s < least[place]]

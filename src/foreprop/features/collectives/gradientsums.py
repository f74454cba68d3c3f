"""The memory in which gradients are summed, with what is counted beside them, and their updates.

Behind a parameter's elements lie `MARKS` more, the marks, which are summed with them: how many
ranks had a gradient, how many had changed the value by hand, and for each bit of a digest, how many
ranks have it. The digest is of what must be alike everywhere, the optimizer's settings above all.
So ranks that disagree notice it in the sum itself, without another message.

The user's optimizer is applied to one parameter at a time beside the training thread. Each
parameter has an optimizer of its own: of the user's class, with the user's attributes, and with one
group that holds a stand-in, which shares the parameter's memory but has its own gradient. So any
optimizer works that treats each parameter by itself, and the user's gradients stay what they were.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from foreprop.core.agreement import describe_groups
from foreprop.core.manifest import (
    ITEMSIZE_BYTES,
    NO_GROUP,
    Aggregation,
    ParameterInfo,
    Reduction,
    wire_dtypes_of,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.slicing import Packs, packed_elems
from foreprop.core.wire import Flag
from foreprop.engine.rendezvous import Board
from foreprop.engine.sums import SameBatch, add_up, clip, finish_sum, square_sum
from foreprop.engine.tensors import DTYPES
from foreprop.errors import StepTimeout, TrainingLoopError
from foreprop.features.collectives.gpu import DeviceWork
from foreprop.features.collectives.group import Group
from foreprop.features.collectives.order import Chunk, Piece, cut_chunks
from foreprop.params.finite import check_finite
from foreprop.params.moving_average import LocalAverages
from foreprop.params.setup import Setup

_DIGEST_BITS = 18
_OTHERS_S = 5.0
_KEPT = 3  # settings of a step and of the next may be announced while the one before is summed
_MOST_MARKS = 64
MARKS = 2 + _DIGEST_BITS
"""The number of elements behind a parameter's; none of them exceeds the number of ranks."""
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""The highest count that a type has exactly, in whatever order ones are added up."""


class _Settings(NamedTuple):
    since: int
    text: str  # JSON
    digest: int
    scale: float  # what the loss is multiplied by


class StepSettings:
    """One rank's settings of the optimizer, for the last steps at which they changed. Any thread.

    All ranks' are compared while gradients are summed.
    """

    def __init__(self, board: Board, *, ranks: int) -> None:
        self._board = board
        self._ranks = ranks
        self._kept = [_Settings(0, "", 0, 1.0)]

    def announce(self, step: int, text: str, scale: float = 1.0) -> None:
        before = [settings for settings in self._kept if settings.since != step]
        now = _Settings(step, text, zlib.crc32(text.encode()), scale)
        self._kept = [*before[1 - _KEPT :], now]

    def _at(self, step: int) -> _Settings:
        return next(settings for settings in reversed(self._kept) if settings.since <= step)

    def scale_at(self, step: int) -> float:
        return self._at(step).scale

    def all_at(self, step: int) -> int:
        """The digest of a step's settings as a number."""
        return self._at(step).digest

    def digest_at(self, step: int, alike: int) -> list[int]:
        """The digest's bits, for a sum: if all ranks have the same, each is 0 or their number.

        ``alike``: what else must be the same on every rank.
        """
        digest = self._at(step).digest ^ (zlib.crc32(str(alike).encode()) if alike else 0)
        return [digest >> bit & 1 for bit in range(_DIGEST_BITS)]

    def describe_difference(self, step: int) -> TrainingLoopError:
        """How the ranks' settings differ: each comes here, and publishes its own."""
        self._board.publish(f"settings/{self._board.rank}", self._at(step).text)
        found: list[Any] = []
        # a rank may have failed otherwise and publish nothing; and not all settings are JSON
        with contextlib.suppress(StepTimeout, ValueError):
            for rank in range(self._ranks):
                text = self._board.lookup(f"settings/{rank}", "its settings", timeout_s=_OTHERS_S)
                found.append(json.loads(text or "[{}]"))  # or it has announced nothing
        for rank, groups in enumerate(found):
            if groups != found[0]:
                return TrainingLoopError(describe_groups(step, (0, rank), found[0], groups))
        return TrainingLoopError(
            f"step {step}: the ranks use their gradients differently: the optimizer's settings"
            " differ, or some have run other backward passes, or read or edited gradients, and"
            " others have not"
        )


class GradientSums:
    """One rank's gradients as they are summed; one thread at a time touches a parameter's sum."""

    def __init__(
        self, setup: Setup, settings: StepSettings, group: Group, device: DeviceWork
    ) -> None:
        config, parameters = setup.config, setup.infos
        self.flags = [0] * len(parameters)  # the flags with which each gradient was pushed
        self._parameters = parameters
        self._memory = setup.memory
        self._settings = settings
        self._aggregation = setup.aggregation
        self.device = device
        self._rank = group.rank
        self._ranks = group.size
        on_wire = wire_dtypes_of(parameters, config.wire_dtype, config.codecs)
        self._dtypes = [_sum_dtype(info.dtype, on_wire[n]) for n, info in enumerate(parameters)]
        self.packs = setup.packs(config.chunk_elems)
        self.elems = packed_elems([info.elems for info in parameters], self.packs)
        """How much is summed under each parameter's number."""
        self.lands = setup.by_workers and self.device.on_host and not config.codecs
        """Whether averages land chunk by chunk, which a sum has just brought into the cache."""
        self.chunks = cut_chunks(self.elems, config.chunk_elems, kinds=self._dtypes)
        # Parameters that share a chunk have their sums side by side, so a chunk, too, is a view.
        self._sums: dict[int, torch.Tensor] = {}
        self._families = _families(self.chunks)
        # One parameter's gradients tell whether all ranks have the same batch; not on a device,
        # which would have to wait for the answer.
        compares = group.rank == 0 and group.size > 1 and self.device.on_host
        self._same_batch = SameBatch("rank 0") if compares else None
        self._compared = _first_of_several(parameters, self.packs)
        self._own = torch.empty(0)
        # Kept for all threads: not on a device, where each has a stream of its own.
        self._marks: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}  # most have the same

    def size_bytes(self, piece: Piece) -> int:
        return (piece[2] - piece[1]) * self._dtypes[piece[0]].itemsize

    def chunk_sizes_bytes(self) -> list[int]:
        return [chunk.elems * self._dtypes[chunk.parameters[0]].itemsize for chunk in self.chunks]

    # Before the sum.
    def fill(self, chunk: int, step: int) -> torch.Tensor:
        """This rank's summand of a chunk, in the memory that the sum replaces."""
        for piece in self.chunks[chunk].pieces:
            self._fill(piece, step)
        return self._view_of(chunk)

    def _view_of(self, chunk: int) -> torch.Tensor:
        pieces = self.chunks[chunk].pieces
        (first, start, _), (last, _, stop) = pieces[0], pieces[-1]
        begin, total = self._sum_of(first), self._sum_of(last)
        begin_elems = begin.storage_offset() + start
        if stop == self.elems[last]:
            stop += MARKS
        elems = total.storage_offset() + stop - begin_elems
        return begin.as_strided((elems,), (1,), begin_elems)

    def _sum_of(self, parameter: int) -> torch.Tensor:
        if parameter not in self._sums:
            family = self._families[parameter]
            ends = list(accumulate(self.elems[p] + MARKS for p in family))
            dtype = self._dtypes[family[0]]
            memory = torch.empty(ends[-1], dtype=dtype, device=self.device.device)
            for own, run in zip(family, pairwise([0, *ends]), strict=True):
                self._sums[own] = memory[slice(*run)]
        return self._sums[parameter]

    def _fill(self, piece: Piece, step: int) -> None:
        parameter, start, stop = piece
        total = self._sum_of(parameter)
        info = self._parameters[parameter]
        flags = self.flags[parameter]
        if flags & Flag.NO_GRADIENT:
            total[start:stop] = 0
        else:
            itemsize = ITEMSIZE_BYTES[info.dtype]
            part = self._memory[parameter].take_gradient(start * itemsize, stop * itemsize)
            total[start:stop] = self.device.flat(part, DTYPES[info.dtype])
            if self._aggregation.reports_nonfinite:
                check_finite(total[start:stop], f"rank {self._rank}", info.name, step)
        if self._same_batch is not None and parameter == self._compared.parameter:
            if len(self._own) != len(total):
                self._own = torch.zeros_like(total)
            self._own[start:stop] = total[start:stop]
        if stop == self.elems[parameter]:
            total[stop:] = self._marks_of(flags, step, total)

    def _marks_of(self, flags: int, step: int, total: torch.Tensor) -> torch.Tensor:
        key = (self._settings.all_at(step), flags, total.dtype)
        marks = self._marks.get(key)
        if marks is None:
            if len(self._marks) == _MOST_MARKS:  # a learning rate may change in every step
                self._marks = {}
            told = not flags & Flag.NO_GRADIENT, bool(flags & Flag.VALUE_CHANGED)
            values = (*told, *self._digest(flags, step))
            marks = torch.tensor(values, dtype=total.dtype, device=total.device)
            if self.device.on_host:
                self._marks[key] = marks
        return marks

    def _digest(self, flags: int, step: int) -> list[int]:
        # flags say who updates, and which round it is
        alike = flags & ~(Flag.NO_GRADIENT | Flag.VALUE_CHANGED)
        return self._settings.digest_at(step, alike)

    # After the sum.
    def finish_chunk(self, chunk: int, step: int) -> None:
        """Have the averages of a summed chunk land, where they do chunk by chunk."""
        if self.lands:
            for piece in self.chunks[chunk].pieces:
                self._land(piece, step)

    def _land(self, piece: Piece, step: int) -> None:
        # where no rank has had a gradient nobody is shown it
        parameter, start, stop = piece
        info = self._parameters[parameter]
        room = self.device.flat(self._memory[parameter].landing_bytes(), DTYPES[info.dtype])
        summed, average = self._sum_of(parameter)[start:stop], room[start:stop]
        if summed.dtype == average.dtype:
            self._finish(summed, average, info, step)  # without a pass over memory to copy
        else:
            average.copy_(self._finished(summed, info, step))

    def maybe_aggregate(self, parameter: int, step: int) -> torch.Tensor | None:
        """The aggregated gradient, flat, if any rank had one; raises if the ranks do not agree."""
        if not self.any_had(parameter, step):
            return None
        gradient = self._sum_of(parameter)[: self.elems[parameter]]
        return self._finished(gradient, self._parameters[parameter], step)

    def any_had(self, parameter: int, step: int) -> bool:
        """Whether any rank had a gradient; raises if the ranks do not agree."""
        info, elems = self._parameters[parameter], self.elems[parameter]
        total = self._sum_of(parameter)
        if not self._had_all(self.flags[parameter], step, total[elems:]):
            with_gradient, changed, *digests = (round(mark) for mark in total[elems:].tolist())
            if 0 < changed < self._ranks:
                raise TrainingLoopError(
                    f"{info.name} was changed by hand before step {step} on {changed} of"
                    f" {self._ranks} ranks; with architecture='ring' change it on every rank alike"
                )
            if digests != [self._ranks * bit for bit in self._digest(self.flags[parameter], step)]:
                raise self._settings.describe_difference(step)
            if not with_gradient:
                return False
        self._compare(parameter, total[:elems])
        return True

    def _had_all(self, flags: int, step: int, marks: torch.Tensor) -> bool:
        """Whether all ranks had a gradient, and agree: mostly so, and told by one comparison."""
        if not self.device.on_host:
            return False
        flags &= ~(Flag.NO_GRADIENT | Flag.VALUE_CHANGED)
        return torch.equal(marks, self._marks_of(flags, step, marks) * self._ranks)

    def _compare(self, parameter: int, total: torch.Tensor) -> None:
        if self._same_batch is not None and parameter == self._compared.parameter:
            # if all have the same batch, the sum is this rank's gradient added up for each of them
            _, start, stop = self._compared
            own, total = self._own[start:stop], total[start:stop]
            same = add_up([own.clone(), *[own] * (self._ranks - 1)], total.dtype)
            self._same_batch.look(0, [same, total], many=self._ranks)
            if not self._same_batch.watching:
                self._same_batch, self._own = None, torch.empty(0)

    def _finished(self, total: torch.Tensor, info: ParameterInfo, step: int) -> torch.Tensor:
        # as if it had not been cast
        gradient = total.to(torch.promote_types(total.dtype, torch.float32))
        self._finish(gradient, gradient, info, step)
        return gradient

    def _finish(
        self, total: torch.Tensor, out: torch.Tensor, info: ParameterInfo, step: int
    ) -> None:
        scale = self._settings.scale_at(step)
        finish_sum(total, self._reduction(info), workers=self._ranks, scale=scale, out=out)

    def aggregated(self, parameter: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat. Training thread."""
        info = self._parameters[parameter]
        total = self._sum_of(parameter)[: self.elems[parameter]]
        if total.dtype == torch.float32 or total.dtype == torch.float64:
            return total  # finished in place
        total = total.float()
        finish_sum(total, self._reduction(info), workers=self._ranks, scale=1.0, out=total)
        return total

    def _reduction(self, info: ParameterInfo) -> Reduction:
        return self._aggregation.reduction_of(sparse=info.sparse)


def _first_of_several(infos: Sequence[ParameterInfo], packs: Packs) -> Piece:
    """Where the first parameter of several elements is, in what it is summed with."""
    for number, info in enumerate(infos):
        if info.elems > 1:
            pack = next((pack for pack in packs if number in pack), (number,))
            start = sum(infos[before].elems for before in pack if before < number)
            return Piece(pack[0], start, start + info.elems)
    return Piece(-1, 0, 0)


def _sum_dtype(dtype: str, wire_dtype: str) -> torch.dtype:
    """The type in which a parameter's gradients are summed, and in which they travel.

    For half-precision parameters it is float32: summing in half precision would lose small
    gradients. A wire type of float32's gradients is what the user has asked for.
    """
    on_wire = DTYPES[wire_dtype]
    return on_wire if dtype == "float32" else torch.promote_types(on_wire, torch.float32)


def _families(chunks: Sequence[Chunk]) -> dict[int, list[int]]:
    """All parameters that chunks connect, directly or through others, in order; by each."""
    families: dict[int, list[int]] = {}
    for chunk in chunks:
        family = families.setdefault(chunk.parameters[0], [chunk.parameters[0]])
        for parameter in chunk.parameters[1:]:
            family.append(parameter)
            families[parameter] = family
    return families


# What becomes of a sum.
Groups = tuple[Mapping[str, Any], ...]
"""The parameter groups' settings as they were at some time, without the parameters."""

_KEPT_GROUPS = 2  # some of a step's updates are still pending when the next one is announced


def settings_of(optimizer: torch.optim.Optimizer) -> Groups:
    """A copy of the settings, which the user, or a scheduler, cannot change any more."""
    return tuple(
        _copied({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def comparable(settings: Groups) -> list[dict[str, Any]]:
    """The settings with numbers for tensors: equal if and only if the settings are."""
    return [
        {
            name: [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
        }
        for group in settings
    ]


class LocalUpdater:
    """Applies the user's optimizer to one parameter at a time.

    `update`, `show` and `end_step` are called from any thread, without recording gradients. The
    calls for one parameter must follow each other.
    """

    def __init__(self, setup: Setup) -> None:
        optimizer, parameters, decay = setup.optimizer, setup.parameters, setup.config.ema
        self.averages = LocalAverages(parameters, decay) if decay is not None else None
        self._memory = setup.memory  # for gradients that the training thread applies
        self._optimizer = optimizer
        self._parameters = parameters
        # the bare function: torch's wrappers (profiler, hooks) cost as much as a small update
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(optimizer).step)
        group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        # the optimizer need not have all, and those others are never updated
        self._group_of = [group_of.get(id(parameter), NO_GROUP) for parameter in parameters]
        self._announced: list[tuple[int, Groups]] = []
        self._stand_ins: list[torch.nn.Parameter | None] = [None] * len(parameters)
        self._own = [self._optimizer_of_its_own() for _ in parameters]

    def _optimizer_of_its_own(self) -> torch.optim.Optimizer:
        cls = type(self._optimizer)
        own: torch.optim.Optimizer = cls.__new__(cls)
        replaced = ("step", "zero_grad")  # the session's, in the user's object
        own.__dict__.update({k: v for k, v in vars(self._optimizer).items() if k not in replaced})
        own.param_groups = []
        own.state = defaultdict(dict)
        return own

    def announce(self, step: int) -> None:
        """Have the optimizer's settings count from ``step`` on as they are now."""
        self._announced = [
            *self._announced[1 - _KEPT_GROUPS :],
            (step, settings_of(self._optimizer)),
        ]

    def update(self, parameter: int, step: int, gradient: torch.Tensor) -> None:
        stand_in = self._stand_in(parameter)
        own = self._own[parameter]
        settings = next(groups for since, groups in reversed(self._announced) if since <= step)
        group = settings[self._group_of[parameter]]
        own.param_groups = [{**group, "params": [stand_in]}]
        stand_in.grad = gradient.view(stand_in.shape).to(stand_in)
        self._step(own)
        stand_in.grad = None

    def show(self, parameter: int, gradient: torch.Tensor) -> None:
        """Give the aggregated gradient to the training thread, which applies it."""
        self._memory[parameter].land_average(gradient)

    def shown(self, parameter: int) -> None:
        """Tell the training thread that the aggregated gradient has landed."""
        self._memory[parameter].answered()

    def end_step(self, parameter: int) -> None:
        if self.averages is not None:
            self.averages.move(parameter)

    def _stand_in(self, parameter: int) -> torch.nn.Parameter:
        # the user may have given the parameter other memory; its state goes with it
        found, real = self._stand_ins[parameter], self._parameters[parameter]
        if found is None or found.data_ptr() != real.data_ptr():
            state = self._own[parameter].state.pop(found, {}) if found is not None else {}
            found = self._stand_ins[parameter] = torch.nn.Parameter(real.detach())
            self._own[parameter].state[found].update(state)
        return found

    # The state, for checkpoints.
    def show_state(self) -> None:
        """Let the user's optimizer have each parameter's state, where there is one."""
        for number, stand_in in enumerate(self._stand_ins):
            if stand_in is not None and (state := self._own[number].state.get(stand_in)):
                self._optimizer.state[self._parameters[number]] = state

    def take_state(self) -> None:
        """Go on from the states that the user's optimizer has, and from none where it has none."""
        for number, parameter in enumerate(self._parameters):
            state = _copied(self._optimizer.state.get(parameter, {}))
            self._own[number].state[self._stand_in(number)] = state


class LocalState:
    """What every rank has beside the values: state, averages, gradients. Training thread.

    Nothing travels: every rank has its own, and they are alike.
    """

    def __init__(self, setup: Setup, updater: LocalUpdater, sums: GradientSums) -> None:
        self._setup = setup
        self._updater = updater
        self._sums = sums
        self._by_workers = setup.by_workers

    def pull(self, step: int) -> None:
        if not self._by_workers:
            self._updater.show_state()

    def drop(self) -> None:
        """Do nothing: the state is nowhere else."""

    def replace(self, step: int) -> None:
        if not self._by_workers:
            self._updater.take_state()

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        return self._sums.aggregated(parameter)

    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        return self._setup.parameters

    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        return self._updater.averages.values if self._updater.averages is not None else ()

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        if self._updater.averages is not None:
            self._updater.averages.values = list(averages)


class RingUpdates:
    """What becomes of summed gradients: measured for the global norm, clipped, applied or shown.

    The calls for one parameter follow each other, on any threads.
    """

    def __init__(self, sums: GradientSums, updater: LocalUpdater, aggregation: Aggregation) -> None:
        self._sums = sums
        self._updater = updater
        self._aggregation = aggregation
        self._gradients: dict[int, torch.Tensor | None] = {}  # measured and not applied yet
        self._coefficient = 1.0
        self._skip = False

    def use_norm(self, norm: float) -> None:
        """Clip, or skip, the updates that follow by the norm of all gradients."""
        self._coefficient = self._aggregation.coefficient(norm)
        self._skip = self._aggregation.skips(norm)

    def measure(self, parameter: int, step: int) -> SquareSum:
        gradient = self._gradients[parameter] = self._sums.maybe_aggregate(parameter, step)
        return ZERO if gradient is None else square_sum(gradient)

    def update(self, parameter: int, step: int) -> None:
        if self._sums.lands:
            if self._sums.any_had(parameter, step):
                self._updater.shown(parameter)
            return
        if parameter in self._gradients:
            gradient = self._gradients.pop(parameter)
            if gradient is not None:
                self._sums.device.keep(gradient)
        else:
            gradient = self._sums.maybe_aggregate(parameter, step)
        if self._sums.flags[parameter] & Flag.GRADIENT:
            if gradient is not None:
                self._updater.show(parameter, gradient)
            return
        if gradient is not None and not self._skip:
            clip(gradient, self._aggregation, self._coefficient)
            self._updater.update(parameter, step, gradient)
        self._updater.end_step(parameter)

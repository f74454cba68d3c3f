"""The data plane alone: one worker, one server, loopback, no compute, against bare sockets."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from foreprop.backends.composedworker import ServedBackend
from foreprop.backends.processes import ProcessServer
from foreprop.config import Config
from foreprop.engine.worker import WorkerEngine
from foreprop.engine.world import World
from foreprop.session.composition import connect
from foreprop_lab.benchmarks.bare import BarePair, cpu_seconds
from foreprop_lab.benchmarks.staged import Copier, stage
from foreprop_lab.benchmarks.still import StillServer, unchecked

_STEP_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """One way of moving the messages; ``bits_per_s`` count payload in one direction of two."""

    name: str
    bits_per_s: float
    cpu_s_per_gb: float
    ratio: float
    """The throughput over the bare sockets': the median over pairs of consecutive steps."""


class _Vectors(torch.nn.Module):
    """Parameters of forty slices each, as in a layer of two million elements."""

    def __init__(self, slices: int, slice_elems: int) -> None:
        super().__init__()
        per_parameter = 40
        self.vectors = torch.nn.ParameterList(
            torch.zeros(slice_elems * min(per_parameter, slices - start))
            for start in range(0, slices, per_parameter)
        )


def lonely_world() -> World:
    """A world of one whose server is a process of its own."""
    store = HashStore()
    return World(rank=0, size=1, local_size=1, host="127.0.0.1", store=store, raw_store=store)


class WirePair:
    """A real session of one worker and one server process, stepped without any model around.

    A ``still`` server moves bytes only and does not apply its optimizer. Only then may frames carry
    no checksums: if they are not ``checked``. In a ``world`` of two this is one rank's. ``staged``
    gradients are copied before they leave, as a GPU's are (`staged`).
    """

    def __init__(
        self,
        slices: int,
        config: Config,
        *,
        still: bool = False,
        checked: bool = True,
        world: World | None = None,
        staged: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        self._model = _Vectors(slices, config.cut_elems(1))
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        world = world or lonely_world()
        self._still: StillServer | None = None
        if still:
            self._still = StillServer(world.raw_store, config, checked=checked)
            config = config.replace(dedicated_servers=1)
        with contextlib.nullcontext() if checked else unchecked():
            self.session = connect(self._model, optimizer, config, world=world)
        self._copier = Copier() if staged else None
        if self._copier is not None:
            stage(self.session, self._copier)
        self._optimizer = optimizer
        self.parameters = list(self._model.parameters())
        self._gradients = [torch.ones_like(parameter) for parameter in self.parameters]
        self._started = 0  # steps
        self._workers_update = config.update == "workers"
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    @property
    def server_pid(self) -> int:
        if self._still is not None:
            return self._still.pid
        handle = cast(ServedBackend, self.session._training.backends.all[0]).connections.handles[0]
        return handle.pid if isinstance(handle, ProcessServer) else 0

    def step(self) -> float:
        started = time.perf_counter()
        self.start()
        self.finish()
        return time.perf_counter() - started

    def start(self) -> None:
        """Let a step's gradients go, without waiting for anything."""
        self._started += 1
        if self._workers_update:  # a backward pass that computes nothing
            self._optimizer.zero_grad()
            torch.autograd.backward(self.parameters, self._gradients)
        self._optimizer.step()

    def arrived(self) -> int:
        """How many parameters have all that this step brings them."""
        engine = cast(WorkerEngine, self.session._training.backends.engines[0])
        return sum(  # one that is still copied has not been pushed, where a thread waits for it
            engine.is_complete(number) and engine.machine.step_of(number) == self._started
            for number in range(len(self.parameters))
        )

    def finish(self) -> None:
        self.session.flush()

    def close(self) -> None:
        self.session.close()
        if self._copier is not None:
            self._copier.close()
        if self._still is not None:
            self._still.join()


BARE, STILL, UPDATING = "bare sockets", "foreprop, no compute", "foreprop, with SGD"
ENCRYPTED = "foreprop, with SGD, encrypted"
WORKERS = "foreprop, workers update"
NO_CHECKSUMS = ", no checksums"


@contextlib.contextmanager
def encryption() -> Iterator[dict[str, Any]]:
    """The settings of an encrypted session, with a secret that is there as long as this lasts."""
    with tempfile.NamedTemporaryFile() as secret:  # of mode 600
        secret.write(secrets.token_bytes(32))
        secret.flush()
        yield {"encryption": "tls", "secret_file": secret.name}


def measure_wire(*, slice_elems: int, slices: int, steps: int) -> list[WireRow]:
    """Interleave steps of bare sockets and of foreprop: without and with the optimizer, and TLS.

    Rows without checksums show what those cost.
    """
    config = Config.resolve("p3", slice_elems=slice_elems, update="servers")
    message_bytes = slice_elems * 4
    runs: dict[str, tuple[Callable[[], float], int]] = {}
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        bare = BarePair(message_bytes, slices, config.unsent_bytes)
        stack.callback(bare.close)
        runs[BARE] = (bare.step, bare.pid)
        tls = config.replace(**stack.enter_context(encryption()))
        workers = config.replace(update="workers")
        kinds = {STILL: config, STILL + NO_CHECKSUMS: config, UPDATING: config, ENCRYPTED: tls}
        kinds |= {WORKERS: workers, WORKERS + NO_CHECKSUMS: workers}
        for name, its in kinds.items():
            still, checked = name.startswith((STILL, WORKERS)), not name.endswith(NO_CHECKSUMS)
            pair = WirePair(slices, its, still=still, checked=checked)
            stack.callback(pair.close)
            runs[name] = (pair.step, pair.server_pid)
        for number in range(steps + _STEP_WARM_UP):
            for name, (step, pid) in runs.items():
                before = cpu_seconds(pid)
                taken = step()
                if number >= _STEP_WARM_UP:
                    seconds.setdefault(name, []).append(taken)
                    cpu[name] = cpu.get(name, 0.0) + cpu_seconds(pid) - before
    megabytes = 2 * message_bytes * slices * steps / 1e6  # both directions
    return [
        WireRow(
            name=name,
            bits_per_s=message_bytes * slices * 8 / statistics.median(times),
            cpu_s_per_gb=cpu[name] / megabytes * 1e3,
            ratio=statistics.median(b / t for b, t in zip(seconds[BARE], times, strict=True)),
        )
        for name, times in seconds.items()
    ]

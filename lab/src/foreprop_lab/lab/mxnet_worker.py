"""One process of MXNet's own parameter server: run by another Python, which has no foreprop.

``PYTHON -I mxnet_worker.py PARENT_PID`` with mxnet 1.9.1, numpy < 1.24 and the standard library,
Python 3.7 or newer. ``DMLC_ROLE`` says what it is: scheduler and server work inside of ``import
mxnet`` until they are killed; a worker reads its task from standard input, answers with its
version when all nodes have joined, and then answers every line ``steps N``. Lines are JSON.

The emulated device is `foreprop_lab.lab.accelerator.DeviceClock` again, and a step is what
`foreprop_lab.lab.systems` has it: from the end of a forward pass, in which each layer waits for its
parameters, to the end of the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any

LATE_S = 0.5e-3
HELD_S = 5e-6
GRADIENT = 1e-3
LEARNING_RATE = 0.1
MOMENTUM = 0.9
UNUSABLE = 3
"""Exit status if this Python has no mxnet that works; the last line of standard error says why."""
_PR_SET_PDEATHSIG = 1


class Launches:
    """`foreprop_lab.lab.accelerator.Launches` with a call as MXNet's own are, by ctypes."""

    def __init__(self, cost_s: float, share: float) -> None:
        self._cost_s = cost_s
        self._share = share
        self._call = ctypes.CDLL(None).getpid  # which gives the interpreter's lock away

    def make(self, seconds: float) -> float:
        held_s, sleeps, now = 0.0, self._sleeps(), time.monotonic()
        for _ in range(int(self._share * seconds / self._cost_s)):
            started = now
            self._call()
            now = time.monotonic()
            late_s = now - started
            ends_at = started + self._cost_s + (late_s if late_s > HELD_S else 0.0)
            while now < ends_at:
                now = time.monotonic()
            if now - started - self._cost_s > HELD_S:
                before, sleeps = sleeps, self._sleeps()
                if sleeps > before:
                    held_s += now - started - self._cost_s
        return held_s

    def _sleeps(self) -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Clock:
    """The emulated device's clock; see `foreprop_lab.lab.accelerator.DeviceClock`."""

    def __init__(self, launches: Any = None) -> None:
        self._launches = launches
        self.free_at = time.monotonic()
        self.idle_s = 0.0
        self.held_s = 0.0

    def occupy(self, seconds: float) -> None:
        if self._launches is not None:
            held_s = self._launches.make(seconds)
            self.held_s += held_s
            self.free_at += held_s
        self.free_at += seconds
        remaining = self.free_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def waited(self, since: float) -> None:
        now = time.monotonic()
        if now - since > LATE_S and now > self.free_at:
            self.idle_s += now - self.free_at
            self.free_at = now

    def restart(self) -> None:
        self.free_at = max(self.free_at, time.monotonic())


class Store:
    """The parameters, and how MXNet's trainer synchronises each: ``gluon.Trainer`` of 1.9.1.

    KVStore: SGD on the servers, which return weights (``update_on_kvstore``, its default for
    ``dist_sync``). P3 refuses that: servers return the sum, and the worker updates each array as
    soon as its sum is there (MXNet's engine knows on what an operation depends).
    """

    def __init__(self, mxnet: Any, sizes_elems: list[int], p3: bool) -> None:
        self._kv = mxnet.kv.create("dist_sync")
        if self._kv.is_capable("optimizer") == p3:
            give_up("this mxnet has no P3" if p3 else "this mxnet has no optimizer on servers")
        optimizer = mxnet.optimizer.SGD(
            learning_rate=LEARNING_RATE, momentum=MOMENTUM, rescale_grad=1.0 / self._kv.num_workers
        )
        self._update = mxnet.optimizer.get_updater(optimizer) if p3 else None
        if not p3:
            self._kv.set_optimizer(optimizer)
        self.weights = [mxnet.nd.zeros((size,)) for size in sizes_elems]
        self._gradients = [mxnet.nd.zeros((size,)) for size in sizes_elems]
        keys = list(range(len(self.weights)))  # if not ascending, P3 deadlocks
        self._kv.init(keys, self.weights)  # all at once: each call is a barrier
        mxnet.nd.waitall()

    def make_gradient(self, key: int) -> None:
        """Fill a gradient, which pulling overwrites; returns at once."""
        self._gradients[key][:] = GRADIENT

    def synchronise(self, key: int) -> None:
        """Send the gradient; returns at once, and whoever then reads the weight waits."""
        gradient, weight = self._gradients[key], self.weights[key]
        if self._update is None:
            self._kv.pushpull(key, gradient, out=weight, priority=-key)
        else:
            self._kv.pushpull(key, gradient, priority=-key)
            self._update(key, gradient, weight)

    def check(self, expected: float) -> None:
        """Raise unless every element of every array has had every gradient of every worker."""
        for key, weight in enumerate(self.weights):
            values = weight.asnumpy()
            for value in (float(values.min()), float(values.max())):
                if not abs(value - expected) <= 1e-3 * abs(expected):
                    raise ValueError(f"array {key} has {value:g}, not {expected:g}")


class Worker:
    """The model whose layers wait for their parameters, and the device that it occupies."""

    def __init__(self, mxnet: Any, task: Any) -> None:
        sizes_elems: list[int] = []
        self._layers = []
        for layer in task["layers"]:
            keys = range(len(sizes_elems), len(sizes_elems) + len(layer["sizes_elems"]))
            sizes_elems += layer["sizes_elems"]
            self._layers.append((layer, keys))
        launch_s = task["launch_s"]
        share = task["launch_share"]
        self._clock = Clock(None if launch_s is None else Launches(launch_s, share))
        self._weight = self._velocity = 0.0
        self._store = Store(mxnet, sizes_elems, task["p3"])

    def block(self, count: int) -> dict[str, list[float]]:
        """Make ``count`` steps, by the device's clock, after a forward pass that does not count."""
        clock = self._clock
        clock.restart()
        self._forward()
        step_s, waited_s, held_s = [], [], []
        for _ in range(count):
            started, idle_before, held_before = clock.free_at, clock.idle_s, clock.held_s
            self._backward()
            self._forward()
            step_s.append(clock.free_at - started)
            waited_s.append(clock.idle_s - idle_before)
            held_s.append(clock.held_s - held_before)
        self._store.check(self._weight)
        return {"step_s": step_s, "waited_s": waited_s, "held_s": held_s}

    def _forward(self) -> None:
        for layer, keys in self._layers:
            asked_at = time.monotonic()
            for key in keys:
                self._store.weights[key].wait_to_read()
            self._clock.waited(asked_at)
            self._clock.occupy(layer["forward_s"])

    def _backward(self) -> None:
        for layer, keys in reversed(self._layers):
            for key in keys:  # a device makes them within the time of its backward pass
                self._store.make_gradient(key)
            self._clock.occupy(layer["backward_s"])
            for key in keys:
                self._store.synchronise(key)
        self._velocity = MOMENTUM * self._velocity - LEARNING_RATE * GRADIENT
        self._weight += self._velocity


def give_up(why: str) -> None:
    sys.stderr.write(f"\n{why}\n")
    sys.stderr.flush()
    os._exit(UNUSABLE)


def die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it has ended already
        os._exit(1)


def import_mxnet() -> Any:
    """Import mxnet, which does not return in a scheduler or server."""
    try:
        import mxnet  # type: ignore[import-not-found]
    except (ImportError, AttributeError, OSError) as error:
        # AttributeError: numpy's that 1.24 took away; OSError: a library that is not there
        give_up(f"{type(error).__name__}: {error}")
    return mxnet


def work() -> None:
    """Answer the lines of standard input until it ends."""
    # what others print goes to standard error: answers have standard output alone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    mxnet = import_mxnet()
    worker = Worker(mxnet, task)
    answers.write(json.dumps({"kind": "ready", "version": mxnet.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        block = worker.block(int(line.split()[1]))
        answers.write(json.dumps(dict(block, kind="block")) + "\n")
        answers.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        if os.environ["DMLC_ROLE"] == "worker":
            work()
        else:
            import_mxnet()
    except Exception:
        traceback.print_exc()
    os._exit(1)  # at once: MXNet's exit handlers wait for the other nodes

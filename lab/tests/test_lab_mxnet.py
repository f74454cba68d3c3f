"""MXNet's place in the lab, with a pretended MXNet: what is said to it, and what becomes of it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import ConfigError, RemoteProtocolError, StepTimeout, TransportError
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop_lab.lab import accelerator, mxnet, mxnet_worker
from foreprop_lab.lab.mxnet import MxnetSystem
from foreprop_lab.setting.labsetting import LabSetting

PRETENDED_MXNET = """
import json, os, sys, time
from types import SimpleNamespace

ROLE = os.environ["DMLC_ROLE"]
FOLDER = os.path.dirname(__file__)
P3 = os.environ.get("DMLC_PS_VAN_TYPE") == "p3"
__version__ = "1.9.1"
print("chatter")
with open(f"{FOLDER}/{ROLE}.json", "w") as file:
    json.dump({"environment": dict(os.environ), "pid": os.getpid()}, file)
if WAY == "numpy too new":
    import math
    math.bool
if WAY == "server dies" and ROLE == "server":
    sys.exit("no room for keys")
if ROLE != "worker" or WAY == "server dies":
    time.sleep(1000)

class Array:
    def __init__(self, value): self.value = self.velocity = value
    def __setitem__(self, _, value): self.value = value
    def wait_to_read(self): pass
    def asnumpy(self): return self
    def min(self): return self.value
    def max(self): return self.value

class Store:
    num_workers = int(os.environ["DMLC_NUM_WORKER"])
    def is_capable(self, what): return (what == "optimizer") != P3
    def set_optimizer(self, optimizer): self.update = get_updater(optimizer)
    def init(self, keys, weights): assert keys == list(range(4)) and len(weights) == 4
    def pushpull(self, key, gradient, out=None, priority=0):
        assert priority == -key and (out is None) == P3
        if WAY == "hangs": time.sleep(1000)
        if WAY == "dies": sys.stderr.write("lost a wheel"); sys.stderr.flush(); os._exit(7)
        gradient.value *= self.num_workers if WAY != "sums wrongly" or key == 0 else 1
        if out is not None:
            self.update(key, gradient, out)
            gradient.value = out.value  # so does the real one's pull

def SGD(**settings): return SimpleNamespace(**settings)
def get_updater(o):
    def update(key, gradient, weight):
        scaled = o.learning_rate * o.rescale_grad * gradient.value
        weight.velocity = o.momentum * weight.velocity - scaled
        weight.value += weight.velocity
    return update
optimizer = SimpleNamespace(SGD=SGD, get_updater=get_updater)
nd = SimpleNamespace(zeros=lambda shape: Array(0.0), waitall=lambda: None)
kv = SimpleNamespace(create=lambda kind: Store())
"""

PRETENDED_PYTHON = """#!{python}
import runpy, sys
assert sys.argv[1] == "-I"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def foreign_python(folder: Path, way: str = "") -> Path:
    """Runs mxnet_worker.py with a pretended mxnet that behaves in that way."""
    (folder / "mxnet.py").write_text(f"WAY = {way!r}\n" + PRETENDED_MXNET)
    return executable(folder, PRETENDED_PYTHON.format(python=sys.executable))


def executable(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return path


def setting(python: Path, **changes: object) -> LabSetting:
    arrays = [("a.weight", (80, 10)), ("a.bias", (10,)), ("b.weight", (300,)), ("c.weight", (7,))]
    profile = Profile(
        name="small",
        arrays=tuple(ProfiledArray(name, shape, 1.0) for name, shape in arrays),
    )
    values: dict[str, object] = {"nodes": 3, "scale": 10, "compute_s": 0.03, "rate_bits_per_s": 1e9}
    return LabSetting(
        profile=profile,
        systems=("mxnet-kvstore", "mxnet-p3"),
        mxnet_python=python,
        **(values | changes),  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def system(
    python: Path, name: str = "mxnet-kvstore", *, node: int = 0, **changes: object
) -> Iterator[MxnetSystem]:
    made = MxnetSystem(
        setting(python, **changes),
        name,
        node=node,
        address="10.0.0.3",
        root_address="10.0.0.1",
        port=29600,
    )
    with contextlib.closing(made):
        yield made


def told(folder: Path, role: str = "worker") -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"{role}.json").read_text())["environment"]
    return {k: v for k, v in found.items() if k.startswith(("DMLC_", "MXNET_", "PS_", "OMP_"))}


_elder: set[int] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Processes that other tests keep are none of ours."""
    _elder.clear()
    _elder.update(process.pid for process in psutil.Process().children())


def children() -> list[psutil.Process]:
    """Those that this test has started."""
    found = [p for p in psutil.Process().children() if p.pid not in _elder]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("name", "launch_s"), [("mxnet-kvstore", None), ("mxnet-p3", None), ("mxnet-p3", 8e-6)]
)
def test_steps_take_what_the_device_works(
    tmp_path: Path, name: str, launch_s: float | None
) -> None:
    with system(foreign_python(tmp_path), name, launch_s=launch_s) as peer:
        blocks = [peer.steps(3), peer.steps(1)]
    assert peer.version == "1.9.1"
    assert [len(block.step_s) for block in blocks] == [3, 1]
    for block in blocks:
        for step_s, waited_s, held_s in zip(
            block.step_s, block.waited_s, block.held_s, strict=True
        ):
            assert step_s - waited_s - held_s == pytest.approx(0.03)
            assert launch_s or not held_s


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")  # the user's own would change the peer
    monkeypatch.setenv("DMLC_INTERFACE", "eth7")
    with system(foreign_python(tmp_path), "mxnet-p3"):
        pass
    assert told(tmp_path) == {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "29600",
        "DMLC_NODE_HOST": "10.0.0.3",
        "DMLC_NUM_SERVER": "3",
        "DMLC_NUM_WORKER": "3",
        "DMLC_PS_VAN_TYPE": "p3",
        "DMLC_PS_WATER_MARK": "10",
        "MXNET_KVSTORE_SLICE_THRESHOLD": "4000",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "100000",
        "MXNET_CPU_WORKER_NTHREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def test_chosen_slices_without_p3(tmp_path: Path) -> None:
    with system(foreign_python(tmp_path), slice_elems=1000):
        pass
    assert told(tmp_path)["MXNET_KVSTORE_SLICE_THRESHOLD"] == "100"
    assert "DMLC_PS_VAN_TYPE" not in told(tmp_path)


@pytest.mark.parametrize(("node", "count"), [(0, 3), (1, 2)])
def test_scheduler_is_on_node_0(tmp_path: Path, node: int, count: int) -> None:
    with system(foreign_python(tmp_path), node=node):
        assert len(children()) == count
    assert not children()


def test_no_python() -> None:
    with (
        pytest.raises(ConfigError, match=r"mxnet_python is /not/there.*No such file.*mxnet==1\.9"),
        system(Path("/not/there")),
    ):
        pass


def test_python_without_mxnet() -> None:
    with (
        pytest.raises(ConfigError, match=r"No module named 'mxnet'.*pip install mxnet==1\.9\.1"),
        system(Path(sys.executable)),
    ):
        pass


def test_numpy_too_new(tmp_path: Path) -> None:
    python = foreign_python(tmp_path, "numpy too new")
    with pytest.raises(ConfigError, match=r"no attribute 'bool'.*numpy<1\.24"), system(python):
        pass
    assert not children()


def test_not_our_worker(tmp_path: Path) -> None:
    python = executable(tmp_path, "#!/bin/sh\necho hello\nexec sleep 1000\n")
    with pytest.raises(RemoteProtocolError, match="hello"), system(python, node=1):
        pass


def test_server_that_dies_while_the_worker_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxnet, "_LOOK_S", 0.05)
    python = foreign_python(tmp_path, "server dies")
    with (
        pytest.raises(TransportError, match=r"server of mxnet-kvstore on node 1(.|\n)*no room"),
        system(python, node=1),
    ):
        pass


@pytest.mark.parametrize(
    ("way", "says"), [("dies", "code 7(.|\n)*lost a wheel"), ("sums wrongly", "array 1 has")]
)
def test_worker_that_fails(tmp_path: Path, way: str, says: str) -> None:
    with (
        system(foreign_python(tmp_path, way)) as peer,
        pytest.raises(TransportError, match=f"worker of mxnet-kvstore on node 0(.|\n)*{says}"),
    ):
        peer.steps(2)


def test_a_worker_that_was_killed_is_reported(tmp_path: Path) -> None:
    with system(foreign_python(tmp_path)) as peer:
        psutil.Process(json.loads((tmp_path / "worker.json").read_text())["pid"]).kill()
        with pytest.raises(TransportError, match="ended with code -9"):
            peer.steps(2)


def test_nodes_that_do_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxnet, "_START_GRACE_S", 0.7)
    monkeypatch.setattr(mxnet, "_START_GRACE_S_PER_NODE", 0.0)
    python = executable(tmp_path, "#!/bin/sh\necho waiting >&2\nexec sleep 1000\n")
    with (
        pytest.raises(StepTimeout, match="did not start in 1 s; it said:\nwaiting"),
        system(python),
    ):
        pass
    assert not children()


@pytest.mark.parametrize("stopped", [False, True])
def test_worker_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(mxnet, "_STEPS_GRACE_S", 0.1)
    with system(foreign_python(tmp_path, "hangs")) as peer:
        if stopped:
            for child in children():
                child.suspend()
        with pytest.raises(StepTimeout, match="did not make 2 steps in 1 s"):
            peer.steps(2)
        peer.close()
        assert not children()


def test_all_die_with_the_node(tmp_path: Path) -> None:
    """However it ends; also those that are stopped."""
    python = foreign_python(tmp_path)
    starts = (
        f"import os, subprocess, time\n"
        f"command = [{str(python)!r}, '-I', {mxnet_worker.__file__!r}, str(os.getpid())]\n"
        f"subprocess.Popen(command, env=os.environ | {{'DMLC_ROLE': 'server'}})\n"
        f"time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.DEVNULL) as node:
        try:
            server = psutil.Process(pid_in(tmp_path / "server.json"))
            server.send_signal(signal.SIGSTOP)
        finally:
            node.kill()
    assert server.wait(10) in (None, -signal.SIGKILL)


def pid_in(path: Path) -> int:
    for _ in range(1000):
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads(path.read_text())["pid"])
        time.sleep(0.01)
    raise TimeoutError(f"no {path}")


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.01)), max_size=30), st.floats(0, 1e-3))
def test_device_clock_is_that_of_our_systems(events: list[tuple[bool, float]], lag: float) -> None:
    ours, theirs = (
        simulate(module, name, events, lag)
        for module, name in ((accelerator, "DeviceClock"), (mxnet_worker, "Clock"))
    )
    assert ours == theirs


def simulate(
    module: object, name: str, events: list[tuple[bool, float]], lag: float
) -> list[tuple[float, float]]:
    """Free time and idle time after each event, with simulated time: each sleep is ``lag`` late."""
    now = [5.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + lag

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        clock = getattr(module, name)()
        story = []
        for works, seconds in events:
            if works:
                clock.occupy(seconds)
            else:
                asked_at = now[0]
                now[0] += seconds
                clock.waited(asked_at)
            story.append((clock.free_at, clock.idle_s))
        now[0] += 1.0
        clock.restart()
        return [*story, (clock.free_at, clock.idle_s)]

"""Whole measurements, tiny: real namespaces, real systems, and what is left out without them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import UNSET

from foreprop.errors import PeerLost
from foreprop.plan import limit
from foreprop.plan.refined import CANDIDATES
from foreprop.tools.compare.result import write_records
from foreprop.tools.report.timeline import timeline_from_trace
from foreprop_lab.lab.run import run_lab
from foreprop_lab.setting.links import carried_bytes
from foreprop_lab.setting.records import read_records
from lab.tests.tiny_lab import SETTING, SYSTEMS
from tests.process.harness import ROOT

MODEL_BYTES = limit.model_bytes(SETTING.layers)

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.alone, pytest.mark.lab]


def check_samples(samples: list[tuple[float, int, int]]) -> None:
    """A block of steps: times 10 ms apart, counters that only grow, within what a link lets by."""
    times = [sample[0] for sample in samples]
    assert all(b - a > 0.009 for a, b in itertools.pairwise(times))
    for way in (1, 2):
        counts = [sample[way] for sample in samples]
        assert counts == sorted(counts)
        assert counts[0] < MODEL_BYTES / 10
        steps = SETTING.iterations + 1
        assert 0.7 * steps * MODEL_BYTES < counts[-1] < 1.6 * steps * MODEL_BYTES
        assert counts[-1] * 8 < 1.15 * SETTING.rate * times[-1] + 8 * 100_000


def test_measures_all_systems_in_one_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    result = run_lab(SETTING, progress=said.append)
    if result.notices:
        pytest.skip(result.notices[0])
    assert "secret" not in capfd.readouterr().err  # nobody else reaches its namespaces
    records = result.records
    assert tuple(record.system for record in records) == SYSTEMS
    for record in records:
        assert record.network == "namespaces"
        assert record.model == "resnet110_cifar"
        assert (record.scale, record.nodes, record.iterations) == (16, 2, 3)
        assert record.rate_bits_per_s == SETTING.rate
        assert record.balance == pytest.approx(1.0)
        assert record.compute_s == pytest.approx(0.1)
        assert record.wire_s == pytest.approx(MODEL_BYTES * 8 / record.rate_bits_per_s)
        assert record.limit_s == SETTING.limit_s > record.compute_s
        assert 0 < record.efficiency <= 1.05
        assert record.efficiency == record.limit_s / record.iteration_s.median
        assert record.iteration_s.p10 <= record.iteration_s.median <= record.iteration_s.p90
        assert 0 <= record.waiting_s < 5
        assert record.cpu_s_per_gb > 0
        assert record.cpu_bound == (record.cpu_share > 0.8)
        assert record.slice_elems == 50_000 // 16
        assert {"foreprop", "torch", "python", "linux"} <= record.versions.keys()
    buckets = [record.bucket_bytes for record in records]
    assert buckets[:3] == [None, None, 25 * 2**20 // 16]
    assert buckets[3] in [n * 2**20 // 16 for n in (1, 2, 5, 10, 25, 50, 100)]
    assert tuple(result.samples) == SYSTEMS
    for samples in result.samples.values():
        check_samples(samples)
    assert [line for line in said if "block" in line] == [f"{s}: block 1 of 1" for s in SYSTEMS]
    path = tmp_path / "results.json"
    write_records(path, records)
    assert read_records(path) == records


def test_ddp_is_traced_as_the_presets_are(tmp_path: Path) -> None:
    """Every step computes each layer both ways, sends the model once, and then waits."""
    setting = replace(SETTING, systems=("p3", "ddp", "ddp-tuned"), trace=tmp_path, iterations=4)
    result = run_lab(replace(setting, sample_network=False))
    if result.notices:
        pytest.skip(result.notices[0])
    assert not (tmp_path / "ddp-tuned").exists()
    steps, layers = setting.iterations + setting.warm_up, len(setting.layers)
    for system, sent in (("p3", "push_sent"), ("ddp", "bucket_reduced")):
        paths = sorted((tmp_path / system).glob("worker-*.trace.json"))
        assert [path.name.partition(".")[0] for path in paths] == ["worker-0", "worker-1"]
        events = json.loads(paths[0].read_text())["traceEvents"]
        for step in range(2, steps):
            of_step = [e for e in events if e.get("args", {}).get("step") == step]
            names = {
                kind: {e["name"].partition(".")[0] for e in of_step if e["cat"] == kind}
                for kind in ("forward", "backward")
            }
            assert len(names["forward"]) == len(names["backward"]) == layers, (system, step)
            size = sum(e["args"]["bytes"] for e in of_step if e["cat"] == sent)
            assert size == pytest.approx(MODEL_BYTES, rel=0.01)
            waits = [e for e in of_step if e["cat"] == "wait"]
            assert system == "p3" or len(waits) == 1
    timelines = {
        name: timeline_from_trace(trace_of(tmp_path / name), first_step=2) for name in ("p3", "ddp")
    }
    assert {event.lane for event in timelines["p3"]} >= {"compute", "push", "reply"}
    assert {event.lane for event in timelines["ddp"]} >= {"compute", "reduce"}


def trace_of(folder: Path) -> Any:
    (path,) = folder.glob("worker-0.*.trace.json")
    return json.loads(path.read_text())


def test_slices_by_name_and_found_automatically(capfd: pytest.CaptureFixture[str]) -> None:
    systems = ("p3@25000", "auto", "p3-auto")
    result = run_lab(replace(SETTING, systems=systems, sample_network=False))
    if result.notices:
        pytest.skip(result.notices[0])
    named, _, automatic = result.records
    assert named.slice_elems == 25_000 // 16
    assert automatic.slice_elems in CANDIDATES
    told = [line for line in capfd.readouterr().err.splitlines() if " goes on with " in line]
    assert len(told) == 2
    slices = re.search(r"slices of ([0-9,]+) elements", told[1])
    assert slices is not None
    assert int(slices[1].replace(",", "")) == automatic.slice_elems
    rate = re.search(r"links of ([0-9.]+) Mbit/s", told[1])
    assert rate is not None
    assert float(rate[1]) * 1e6 == pytest.approx(SETTING.rate, rel=0.2)


def test_codecs_beside_exact_ones_and_hooks_of_ddp(tmp_path: Path) -> None:
    """Bytes on the link are those that foreprop counts, and what the codecs promise."""
    ours, hook = ("p3+none", "p3", "p3+lossless"), "ddp+powersgd:1"
    setting = replace(SETTING, systems=(*ours, hook), compression="int8", iterations=1)
    result = run_lab(setting)
    if result.notices:
        pytest.skip(result.notices[0])
    found = {record.system: record for record in result.records}
    write_records(tmp_path / "results.json", result.records)
    assert read_records(tmp_path / "results.json") == result.records
    counted = {name: found[name].counted_bytes for name in ours}
    sent = {name: found[name].sent_bytes for name in found}
    exact = counted["p3+none"]
    assert exact == pytest.approx(2 * limit.model_bytes(setting.layers), rel=0.25)
    assert 0.25 < counted["p3"] / exact < 0.45
    assert 0.4 < counted["p3+lossless"] / exact < 0.95
    for name in ("p3+none", "p3", "p3+lossless"):  # of 2 nodes half is for the other's server
        frames = int(found[name].counted_frames) // 2
        # how many small frames are acknowledged at once goes by when they come
        rough = 0.05 if counted[name] / 2 / frames > limit.PACKET_BYTES else 0.1
        carried = carried_bytes(frames, counted[name] / 2)
        assert sent[name] == pytest.approx(carried, rel=rough)
    assert sent[hook] < 0.75 * sent["p3+none"]
    assert found["p3"].coded == "all of the bytes in int8"
    assert str(found["p3+lossless"].coded).startswith("all of the bytes in lossless:0.")
    assert found["p3+none"].limit_s > found["p3"].limit_s
    assert found["p3+none"].compression is UNSET
    assert found[hook].compression == "powersgd:1"


def test_loops_that_clip_send_what_others_do(capfd: pytest.CaptureFixture[str]) -> None:
    systems = ("p3", "p3-servers", "p3-clip", "p3-clip-setting")
    result = run_lab(replace(SETTING, systems=systems, iterations=5))
    if result.notices:
        pytest.skip(result.notices[0])
    sent = [result.samples[name][-1][1] for name in systems]
    assert max(sent) < 1.1 * min(sent)
    told = [line for line in capfd.readouterr().err.splitlines() if " update=" in line]
    assert [line.partition("update=")[2].partition(":")[0] for line in told] == [
        "workers",
        "servers",
        "workers",
        "servers",
    ]


def test_every_system_launches_as_much() -> None:
    """What they waited for the interpreter is part of their steps."""
    systems = ("p3", "kvstore", "ring", "ddp")
    setting = replace(SETTING, systems=systems, launch_s=8e-6, sample_network=False)
    result = run_lab(setting)
    if result.notices:
        pytest.skip(result.notices[0])
    for record in result.records:
        assert record.launch_s == 8e-6
        assert record.launching_s == setting.launching_s
        assert 0.1 * record.compute_s < setting.launching_s <= 0.2 * record.compute_s
        assert record.held_s is not UNSET
        assert record.held_s >= 0
        assert record.iteration_s.p90 > record.compute_s


@pytest.mark.parametrize(("aggregated", "models"), [("auto", 1), ("off", 2)])
def test_several_workers_per_node_send_one_gradient(
    aggregated: str, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes node 0's link: 2 (N - 1) / N models per step, or as often for each worker."""
    monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", aggregated)
    setting = replace(SETTING, systems=("p3",), workers_per_node=2, compute_s=0.5)
    result = run_lab(setting)
    if result.notices:
        pytest.skip(result.notices[0])
    (record,) = result.records
    assert (record.nodes, record.workers_per_node) == (2, 2)
    assert record.local_aggregation == aggregated
    _, sent, received = result.samples["p3"][-1]
    steps = setting.iterations + 1
    for counted in (sent, received):
        assert 0.9 * models < counted / (steps * MODEL_BYTES) < 1.4 * models


def test_a_node_that_dies_during_steps_is_named() -> None:
    """Not what other nodes say of the connections that they lose by it."""
    before = psutil.Process().children(recursive=True)
    kills: list[threading.Timer] = []

    def kill_node(line: str) -> None:
        if line.startswith("p3: block"):
            now = psutil.Process().children(recursive=True)
            cluster = [p for p in now if p not in before and "lab.cluster" in " ".join(p.cmdline())]
            node = sorted(cluster, key=lambda p: p.pid)[-1]  # program, init, node 0, node 1
            kills.append(threading.Timer(0.3, node.kill))
            kills[-1].start()

    setting = replace(SETTING, systems=("p3",), iterations=5, compute_s=1.0, sample_network=False)
    with pytest.raises(PeerLost, match=r"^node 1 of the lab has ended$"):
        run_lab(setting, progress=kill_node)
    assert len(kills) == 1
    kills[0].join()


def test_without_namespaces_paces_and_leaves_out_what_cannot() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode:
        pytest.skip("this user cannot make a user namespace and forbid things in it")
    program = "from lab.tests.tiny_lab import fall_back; fall_back()"
    done = subprocess.run(
        [*inside, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    reason = "no links made by the kernel (no network namespace: No space left on device)"
    notices = [
        f"{reason}: foreprop paces its own sockets",
        "left out, because they need such links: ddp",
    ]
    assert said["notices"] == notices
    assert said["refusal"] == f"{notices[0]}, which ddp, ddp-tuned cannot"
    assert [record["system"] for record in said["records"]] == ["p3"]
    assert said["records"][0]["network"] == "pacing"
    assert 0 < said["records"][0]["efficiency"] <= 1.05
    assert said["samples"] == {}
    assert "Traceback" not in done.stderr

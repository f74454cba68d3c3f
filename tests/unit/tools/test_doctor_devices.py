"""What the doctor says of accelerators: of torch and a made-up sysfs, and what it finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from foreprop.tools.doctor.facts import gather_devices
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.records import Device
from foreprop.tools.doctor.show import report, show
from tests.unit.doctor_example import examination

MODEL = "NVIDIA H100 80GB HBM3"


def device(index: int, **changes: Any) -> Device:
    values: dict[str, Any] = {
        "name": f"cuda:{index}",
        "model": MODEL,
        "memory_bytes": 80 * 2**30,
        "driver": "nvidia 550.54.15",
        "pci": f"0000:{0x17 + index:02x}:00.0",
        "numa_node": 0,
    }
    return Device(**values | changes)


# Gathered.
@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two GPUs, of which the second is at the second node, as the card below bond0 is."""
    driver = tmp_path / "sys/bus/pci/drivers/nvidia"
    module = tmp_path / "sys/module/nvidia"
    driver.mkdir(parents=True)
    module.mkdir(parents=True)
    (module / "version").write_text("550.54.15\n")
    (driver / "module").symlink_to(module)
    for number, bus in enumerate(("17", "18")):
        place = on_the_bus(tmp_path, bus, numa_node=number)
        (place / "driver").symlink_to(driver)
    told = tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0"
    told.mkdir(parents=True)
    (told / "information").write_text(f"Model: \t {MODEL}\nGPU UUID: \t GPU-0b0b-18\n")
    for name, node in (("eth0", -1), ("eth1", 1)):
        card = tmp_path / "sys/class/net" / name / "device"
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{node}\n")
    (tmp_path / "sys/class/net/bond0/lower_eth0").mkdir(parents=True)
    (tmp_path / "sys/class/net/bond0/lower_eth1").mkdir(parents=True)
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    return tmp_path


def on_the_bus(root: Path, bus: str, *, class_: str = "0x030200", **files: object) -> Path:
    place = root / f"sys/bus/pci/devices/0000:{bus}:00.0"
    place.mkdir(parents=True)
    values = {"class": class_, "vendor": "0x10de", "device": "0x2330", **files}
    for name, value in values.items():
        (place / name).write_text(f"{value}\n")
    return place


def use(monkeypatch: pytest.MonkeyPatch, *properties: Any) -> None:
    """Have torch see devices with these properties."""
    module = SimpleNamespace(
        device_count=lambda: len(properties), get_device_properties=lambda n: properties[n]
    )
    found = torch.device("cuda") if properties else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)


def test_devices_have_a_driver_and_a_node(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tells its address, the second only its UUID, which the driver knows."""
    common = {"name": MODEL, "total_memory": 80 * 2**30}
    address = {"pci_domain_id": 0, "pci_bus_id": 0x17, "pci_device_id": 0}
    use(
        monkeypatch,
        SimpleNamespace(**common, **address),
        SimpleNamespace(**common, uuid="0b0b-18"),
    )
    found = gather_devices(torch, "bond0", machine)
    assert found.devices == [device(0), device(1, numa_node=1)]
    assert found.interface_numa_node == 1
    assert (found.devices_error, found.unseen_devices) == (None, [])


def test_unknown_facts_of_a_device_are_left_open(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SimpleNamespace(name="Max 1550", driver_version="1.6.33", uuid="other"))
    found = gather_devices(torch, "eth0", machine)
    assert found.devices == [Device(name="cuda:0", model="Max 1550", driver="1.6.33")]
    assert found.interface_numa_node is None
    assert gather_devices(torch, "lo", machine).interface_numa_node is None
    assert gather_devices(torch, None, machine).interface_numa_node is None


def test_accelerators_that_torch_does_not_see(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_bus(machine, "02", class_="0x030000", vendor="0x1a03")  # the board's own display
    on_the_bus(machine, "03", class_="0x020000")  # a network card
    on_the_bus(machine, "a1", class_="0x120000", vendor="0x1002", device="0x74a1")
    use(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = ["0000:17:00.0 (10de:2330)", "0000:18:00.0 (10de:2330)", "0000:a1:00.0 (1002:74a1)"]
    assert gather_devices(torch, "eth1", machine).unseen_devices == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gather_devices(torch, "eth1", machine).unseen_devices == []


def test_a_backend_that_fails_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)

    def fail(check_available: bool) -> None:
        raise RuntimeError("the driver is too old\nsee the manual")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)
    assert (
        gather_devices(torch, None, machine).devices_error == "RuntimeError: the driver is too old"
    )


def test_the_devices_of_this_machine_are_found() -> None:
    found = gather_devices(torch, "lo")
    assert len(found.devices) == torch.accelerator.device_count()
    assert found.devices_error is None


# Found.
def found_with(workers: int = 2, **facts: Any) -> list[Any]:
    spoilt = {0: facts, 1: facts}
    return find(examination(2, workers=workers, spoilt=spoilt))


GPUS = [device(0), device(1)]


def test_a_device_for_each_worker_near_the_network_is_no_finding() -> None:
    assert found_with(devices=GPUS, nccl="2.27.3", interface_numa_node=0, threads="4") == []


def test_fewer_devices_than_workers() -> None:
    (finding,) = found_with(4, devices=GPUS, visible_devices="0,1", threads="2")
    assert (finding.severity, finding.check) == ("warning", "devices")
    assert "node0, node1: 4 workers, but torch sees 2 devices" in finding.found
    assert "CUDA_VISIBLE_DEVICES is '0,1'" in finding.found
    assert "start 2 workers there" in finding.advice


def test_devices_far_from_the_network() -> None:
    gpus = [device(0), device(1, numa_node=1)]
    (finding,) = found_with(devices=gpus, interface_numa_node=0, threads="4")
    assert finding.severity == "hint"
    assert "eth0 is at NUMA node 0, cuda:1 at node 1: gradients cross" in finding.found
    assert "numactl" in finding.advice


def test_devices_that_torch_does_not_see() -> None:
    (finding,) = found_with(
        devices_error="the driver is too old",
        unseen_devices=["0000:17:00.0 (10de:2330)"],
        threads="4",
    )
    assert "torch 2.13.0 sees no device: the driver is too old; on the PCI bus" in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.advice


def test_hosts_that_differ() -> None:
    other = [device(0, model="NVIDIA A100", driver="nvidia 535.1"), device(1, driver=None)]
    spoilt = {
        0: {"devices": GPUS, "nccl": "2.27.3", "threads": "4"},
        1: {"devices": other, "nccl": "2.26.2", "threads": "4"},
    }
    found = find(examination(2, workers=2, spoilt=spoilt))
    assert [(finding.severity, finding.found.partition(":")[0]) for finding in found] == [
        ("warning", "NCCL differs"),
        ("hint", "the devices differ"),
        ("hint", "drivers differ"),
    ]


def test_devices_are_shown() -> None:
    spoilt = {0: {"devices": GPUS, "nccl": "2.27.3", "interface_numa_node": 1}}
    console = Console(record=True, width=160)
    seen = examination(1, spoilt=spoilt)
    with console.capture() as shown:
        show(console, report(seen, []))
    row = next(line for line in shown.get().splitlines() if "cuda:1" in line)
    assert row.split() == [
        *("node0", "cuda:1", *MODEL.split(), "80.0", "GiB", "nvidia", "550.54.15"),
        *("2.27.3", "0", "1"),
    ]

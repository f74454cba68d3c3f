"""Every finding: what brings it, what it says, and that a healthy cluster has none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foreprop.engine.traffic import Flow, Trip
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.links import usual_rate, usual_trip_s
from foreprop.tools.doctor.records import Examination, Failure, Finding
from tests.unit.doctor_example import GBIT, attempt, examination, facts, flows, resolved, trips


def only(found: list[Finding], severity: str, check: str) -> Finding:
    """The one finding that there is."""
    assert [(f.severity, f.check) for f in found] == [(severity, check)], found
    assert found[0].advice
    return found[0]


def of(found: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in found if finding.check == check]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_healthy_cluster_has_no_findings(count: int) -> None:
    if count == 1:
        assert find(examination(1, together=[])) == []
    else:
        assert find(examination(count)) == []


def test_errors_come_first() -> None:
    spoilt = {0: {"cpus": 16}, 1: {"mtu_bytes": 9000}, 2: {"torch": "2.6.0"}}
    severities = [finding.severity for finding in find(examination(spoilt=spoilt))]
    assert severities == ["error", "warning", "hint"]


# What did not start.
@pytest.mark.parametrize(
    ("kind", "found", "advice"),
    [
        ("unreachable", "cannot be reached by ssh: no route", "`ssh node2 true` works"),
        ("no_python", "Python cannot be started: no route", "--python"),
        ("no_foreprop", "foreprop cannot be imported: no route", "install the same version"),
        ("other_version", "another version of foreprop: no route", "install the same version"),
        ("silent", "does not answer: no route", "--wait"),
        ("ended", "ended early: no route", "try `ssh node2 true`"),
        ("defect", "failed: no route", "correct it there"),
    ],
)
def test_a_host_that_failed_is_named_with_its_reason(kind: str, found: str, advice: str) -> None:
    healthy = examination(2)
    failure = Failure(kind=kind, text="no route", command="ssh node2 true")  # type: ignore[arg-type]
    lost = msgspec.structs.replace(examination(3).hosts[2], facts=None, failure=failure)
    spoilt = msgspec.structs.replace(healthy, hosts=[*healthy.hosts, lost])
    finding = only(find(spoilt), "error", "start")
    assert finding.hosts == ["node2"]
    assert finding.found.startswith("node2: ")
    assert found in finding.found
    assert advice in finding.advice


def test_what_others_saw_of_a_host_that_failed_is_not_repeated() -> None:
    spoilt = examination(
        attempts=[attempt(0, 2, "refused")],
        trips=[Trip(source=1, to=2, error="reset")],
        alone=[Flow(source=2, to=0, error="reset")],
    )
    failure = Failure(kind="ended", text="exit code 3")
    spoilt.hosts[2] = msgspec.structs.replace(spoilt.hosts[2], failure=failure)
    only(find(spoilt), "error", "start")


def test_a_missing_directory() -> None:
    spoilt = {1: {"directory_error": "there is no directory /x"}}
    finding = only(find(examination(spoilt=spoilt)), "error", "directory")
    assert finding.found == "node1: there is no directory /x"


# What is installed.
@pytest.mark.parametrize(
    ("change", "severity", "found"),
    [
        ({"foreprop": "0.2"}, "error", "foreprop differs: node0, node2: 0.1.0; node1: 0.2"),
        ({"torch": "2.6.0"}, "error", "torch differs: node0, node2: 2.13.0; node1: 2.6.0"),
        ({"byteorder": "big"}, "error", "byte order differs: node0, node2: little; node1: big"),
        ({"python": "3.12.1"}, "warning", "Python differs: node0, node2: 3.11; node1: 3.12"),
    ],
)
def test_different_versions(change: dict[str, str], severity: str, found: str) -> None:
    finding = only(find(examination(spoilt={1: change})), severity, "versions")
    assert finding.found == found
    assert finding.hosts == ["node1"]


def test_a_patch_release_of_python_does_not_matter() -> None:
    assert find(examination(spoilt={1: {"python": "3.11.9"}})) == []


def test_torch_that_cannot_be_imported() -> None:
    spoilt = {2: {"torch": None, "torch_error": "ImportError: libx"}}
    finding = only(find(examination(spoilt=spoilt)), "error", "versions")
    assert finding.found == "node2: torch cannot be imported: ImportError: libx"
    assert "node0, node1: 2.13.0" in finding.advice


# Names.
def names(**means: str | None) -> list[Any]:
    """What a host makes of the names; None: nothing."""
    healthy = {entry.name: entry for entry in facts(0).names}
    changed = {
        name: resolved(name, error="Name or service not known")
        if address is None
        else resolved(name, address)
        for name, address in means.items()
    }
    return list((healthy | changed).values())


def test_the_rendezvous_name_that_is_not_known() -> None:
    spoilt = {2: {"names": names(node0=None)}}
    finding = only(find(examination(spoilt=spoilt)), "error", "names")
    assert finding.hosts == ["node2"]
    assert "node2 cannot resolve the name 'node0', where the rendezvous is" in finding.found
    assert "--master-addr" in finding.advice


def test_another_name_that_is_not_known_is_a_hint() -> None:
    finding = only(find(examination(spoilt={2: {"names": names(node1=None)}})), "hint", "names")
    assert "node2 cannot resolve the name 'node1': Name or service" in finding.found


def test_a_name_that_differs_between_hosts() -> None:
    spoilt = {2: {"names": names(node1="10.9.9.9")}}
    finding = only(find(examination(spoilt=spoilt)), "warning", "names")
    assert "'node1' means different addresses: node0, node1: 10.0.0.2; node2: 10.9.9.9" in (
        finding.found
    )
    assert finding.hosts == ["node2"]


def test_the_rendezvous_host_that_takes_itself_for_loopback() -> None:
    """The classic line 127.0.1.1 in /etc/hosts."""
    spoilt = {
        0: {
            "names": names(node0="127.0.1.1"),
            "own_name": resolved("node0", "127.0.1.1"),
            "address": "127.0.1.1",
            "address_error": "interface: ...",
        }
    }
    finding = only(find(examination(spoilt=spoilt)), "error", "names")
    assert "on node0 the rendezvous 'node0' means 127.0.1.1" in finding.found
    assert "/etc/hosts on node0" in finding.advice
    assert "FOREPROP_INTERFACE" in finding.advice


def test_the_same_with_the_interface_set_is_only_gloos_trouble() -> None:
    own = {"names": names(node0="127.0.1.1"), "own_name": resolved("node0", "127.0.1.1")}
    finding = only(find(examination(spoilt={0: own})), "hint", "names")
    assert "the own host name 'node0' means 127.0.1.1" in finding.found
    assert "GLOO_SOCKET_IFNAME=eth0" in finding.advice
    assert find(examination(spoilt={0: own | {"gloo_interface": "eth0"}})) == []


def test_a_rendezvous_that_leads_another_host_to_itself() -> None:
    finding = only(
        find(examination(spoilt={1: {"names": names(node0="127.0.0.1")}})), "error", "names"
    )
    assert "on node1 the name 'node0' means 127.0.0.1, which is node1 itself" in finding.found


# Addresses and ports.
def test_a_host_without_an_address() -> None:
    spoilt = {1: {"address": None, "address_error": "interface is 'eth9'; it must be"}}
    finding = only(find(examination(spoilt=spoilt)), "error", "address")
    assert finding.hosts == ["node1"]
    assert "interface is 'eth9'" in finding.found


def test_a_port_that_is_taken() -> None:
    spoilt = {0: {"rendezvous_error": "cannot listen on port 29500: Address already in use"}}
    finding = only(find(examination(spoilt=spoilt)), "error", "ports")
    assert "cannot listen on port 29500" in finding.found
    assert "--port" in finding.advice


def test_two_hosts_with_one_address() -> None:
    finding = only(find(examination(spoilt={2: {"address": "10.0.0.2"}})), "warning", "address")
    assert finding.hosts == ["node1", "node2"]
    assert "10.0.0.2" in finding.found


def test_one_machine_by_loopback_is_no_finding() -> None:
    spoilt = {n: {"address": "127.0.0.1", "interface": "lo"} for n in range(3)}
    assert find(examination(spoilt=spoilt, rendezvous="127.0.0.1")) == []


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        ("timeout", "node0 gets no answer from node1 at 10.0.0.2 port 40001"),
        ("refused", "node0 is refused by node1 at 10.0.0.2 port 40001"),
        ("stranger", "node0 reaches something else at node1 at 10.0.0.2 port 40001: why"),
        ("failed", "node0 cannot connect to node1 at 10.0.0.2 port 40001: why"),
    ],
)
def test_hosts_that_do_not_reach_each_other(outcome: str, found: str) -> None:
    attempts = [attempt(0, 1, outcome, error="why"), attempt(1, 0)]
    finding = only(find(examination(2, attempts=attempts)), "error", "reach")
    assert found in finding.found
    assert finding.hosts == ["node0", "node1"]


def test_the_ports_that_a_firewall_has_to_open_are_named() -> None:
    finding = only(find(examination(attempts=[attempt(2, 0, "timeout")])), "error", "reach")
    assert "let node2 connect to node0 on all ports from 32768 to 60999" in finding.advice


def test_an_unreached_rendezvous_is_called_so() -> None:
    tried = attempt(2, 0, "timeout", purpose="rendezvous", port=29500)
    finding = only(find(examination(attempts=[tried])), "error", "reach")
    assert "port 29500 (the rendezvous)" in finding.found


# Round trips.
def test_a_slow_round_trip_names_the_pair() -> None:
    slow = trips(3, _0_2={"median_s": 9e-4, "p90_s": 9e-4})
    finding = only(find(examination(trips=slow)), "warning", "round trip")
    assert finding.hosts == ["node0", "node2"]
    assert "between node0 and node2 takes 900 us, where 100 us is usual" in finding.found


def test_a_host_that_is_far_from_all_others_is_named_alone() -> None:
    far = {"median_s": 9e-4, "p90_s": 1e-3}
    finding = only(find(examination(trips=trips(3, _0_2=far, _1_2=far))), "warning", "round trip")
    assert finding.hosts == ["node2"]
    assert "between node2 and every other host takes 900 us" in finding.found


def test_hosts_that_are_all_far_apart() -> None:
    far = {"median_s": 0.02, "p90_s": 0.02}
    spoilt = {n: {"speed_bits_per_s": None} for n in range(2)}
    found = find(
        examination(2, trips=trips(2, _0_1=far), alone=flows(2, _0_1=0.1, _1_0=0.1), spoilt=spoilt)
    )
    assert "20 ms is usual here" in of(found, "round trip")[0].found


def test_round_trips_that_are_uneven() -> None:
    uneven = {"median_s": 1e-4, "p90_s": 5e-3}
    finding = only(find(examination(trips=trips(3, _1_2=uneven))), "hint", "round trip")
    assert finding.hosts == ["node1", "node2"]
    assert "5 ms or more" in finding.found


def test_messages_that_break_off() -> None:
    broken = [*trips(3)[:2], Trip(source=1, to=2, error="timed out")]
    finding = only(find(examination(trips=broken)), "error", "reach")
    assert "small messages from node1 to node2 broke off" in finding.found


# Rates.
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_slow_pair_is_named_with_the_other_direction(count: int) -> None:
    found = find(examination(count, alone=flows(count, _0_1=0.3)))
    finding = only(found, "warning", "rate")
    assert finding.hosts == ["node0", "node1"]
    told = "node0 sends to node1 at 300 Mbit/s (940 Mbit/s the other way), where 940 Mbit/s is"
    assert told in finding.found


@pytest.mark.parametrize("count", [3, 4])
def test_a_host_with_a_slow_link_is_named_even_if_most_directions_are_slow(count: int) -> None:
    slow = {f"_2_{n}": 0.1 for n in range(count)} | {f"_{n}_2": 0.1 for n in range(count)}
    found = of(find(examination(count, alone=flows(count, **slow))), "rate")
    assert [finding.hosts for finding in found] == [["node2"], ["node2"]]
    assert "node2 sends to every other host at 100 Mbit/s or less" in found[0].found
    assert "node2 gets from every other host at 100 Mbit/s or less" in found[1].found


def test_half_the_usual_rate_is_the_limit() -> None:
    assert find(examination(alone=flows(3, _0_1=0.48))) == []
    assert of(find(examination(alone=flows(3, _0_1=0.46))), "rate")


def test_sending_that_breaks_off() -> None:
    broken = [*flows(3)[:-1], Flow(source=2, to=1, error="Connection reset by peer")]
    finding = only(find(examination(alone=broken)), "error", "reach")
    assert "sending from node2 to node1 broke off" in finding.found
    assert "ping -M do -s 1472 node1" in finding.advice


def test_what_is_usual_is_not_moved_by_a_slow_host() -> None:
    slow = flows(3, _0_2=0.1, _2_0=0.1, _1_2=0.1, _2_1=0.1)
    assert usual_rate(slow) == 0.94 * GBIT
    assert usual_rate([]) is None
    far = {"median_s": 0.1}
    assert usual_trip_s(trips(3, _0_2=far, _1_2=far)) == 1e-4
    assert usual_trip_s([]) is None


def test_less_when_all_send_at_once() -> None:
    together = [Flow(source=f.source, to=f.to, bits_per_s=0.2 * GBIT) for f in flows(3)]
    finding = only(find(examination(together=together)), "warning", "all at once")
    assert finding.hosts == ["node0", "node1", "node2"]
    assert "node0 sends 400 Mbit/s (940 Mbit/s alone)" in finding.found


def test_a_link_that_is_slow_one_way_is_not_crowded() -> None:
    slow = {f"_{n}_2": 0.1 for n in range(3)}
    together = [
        Flow(source=f.source, to=f.to, bits_per_s=(0.05 if f.to == 2 else 0.45) * GBIT)
        for f in flows(3)
    ]
    found = find(examination(alone=flows(3, **slow), together=together))
    assert [finding.check for finding in found] == ["rate"]


# Links.
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mtu_bytes": 9000}, "MTU differs: node0, node2: 1500; node1: 9000"),
        ({"speed_bits_per_s": 1.5 * GBIT}, "speed differs: node0, node2: 1 Gbit/s; node1: 1.5"),
        ({"full_duplex": False}, "node1: eth0 is half duplex"),
    ],
)
def test_links_that_differ(change: dict[str, Any], found: str) -> None:
    finding = only(find(examination(spoilt={1: change})), "warning", "link")
    assert found in finding.found
    assert finding.hosts == ["node1"]


def test_a_link_that_claims_more_than_goes_through() -> None:
    spoilt = {n: {"speed_bits_per_s": 10 * GBIT, "mtu_bytes": None} for n in range(3)}
    finding = only(find(examination(spoilt=spoilt)), "hint", "link")
    assert "node0 940 Mbit/s of 10 Gbit/s (eth0)" in finding.found


# Clocks.
@pytest.mark.parametrize(("offset_s", "way"), [(0.05, "ahead of"), (-0.05, "behind")])
def test_a_clock_that_differs(offset_s: float, way: str) -> None:
    found = find(examination(trips=trips(3, _0_2={"offset_s": offset_s})))
    finding = only(found, "warning", "clock")
    assert f"the clock of node2 is 50 ms {way} that of node0" in finding.found


def test_a_clock_that_the_round_trip_hides_is_no_finding() -> None:
    far = {"offset_s": 0.05, "least_s": 0.1}
    assert find(examination(trips=trips(3, _0_2=far))) == []


# Kernels.
def test_congestion_control_that_differs() -> None:
    finding = only(find(examination(spoilt={1: {"congestion_control": "bbr"}})), "hint", "window")
    assert "node0, node2: cubic; node1: bbr" in finding.found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"receive_buffer_bytes": 20_000}, "net.ipv4.tcp_rmem allows 0.01 MB"),
        ({"send_buffer_bytes": 20_000}, "net.ipv4.tcp_wmem allows 0.01 MB"),
        ({"asked_buffer_bytes": 1_000}, "net.core.wmem_max allows 0.006 MB"),
        ({"push_window_bytes": 10_000}, "FOREPROP_PUSH_WINDOW_BYTES allows 0.01 MB"),
    ],
)
def test_buffers_too_small_for_rate_times_round_trip(change: dict[str, int], found: str) -> None:
    """1 Gbit/s x 0.1 ms = 12.5 kB; one finding per host, not per pair."""
    finding = only(find(examination(spoilt={1: change})), "hint", "window")
    assert finding.hosts == ["node1"]
    assert found in finding.found
    assert "needs 0.013 MB" in finding.found


# Processors and limits.
@pytest.mark.parametrize(
    ("workers", "threads", "severity", "found"),
    [
        (1, "16", "warning", "1 worker with 16 threads each, on 8 CPUs"),
        (2, "8", "warning", "2 workers with 8 threads each, on 8 CPUs"),
        (2, "many", "warning", "OMP_NUM_THREADS is 'many', which is no number"),
        (2, None, "hint", "2 workers with 1 thread each, 2 of 8 CPUs"),
        (1, "2", "hint", "1 worker with 2 threads each, 2 of 8 CPUs"),
    ],
)
def test_threads_that_do_not_fit(
    workers: int, threads: str | None, severity: str, found: str
) -> None:
    spoilt = {n: {"threads": threads} for n in range(2)}
    finding = only(find(examination(2, workers=workers, spoilt=spoilt)), severity, "processors")
    assert finding.found.startswith("node0, node1: ")
    assert found in finding.found
    assert f"{8 // workers}" in finding.advice


@pytest.mark.parametrize(("workers", "threads"), [(1, None), (8, None), (2, "4"), (4, "2")])
def test_threads_that_fit(workers: int, threads: str | None) -> None:
    spoilt = {n: {"threads": threads} for n in range(3)}
    assert find(examination(workers=workers, spoilt=spoilt)) == []


def test_numbers_of_cpus_that_differ() -> None:
    finding = only(find(examination(spoilt={1: {"cpus": 4}})), "hint", "processors")
    assert "node0, node2: 8; node1: 4" in finding.found


def test_a_busy_host() -> None:
    finding = only(find(examination(spoilt={1: {"load": 9.5}})), "hint", "processors")
    assert "node1: busy: in the last minute 9.5 threads wanted to run on 8 CPUs" in (finding.found)


def test_what_is_the_same_on_several_hosts_is_one_finding() -> None:
    spoilt = {0: {"open_files": 64}, 1: {"open_files": 32}, 2: {"open_files": 64}}
    found = find(examination(spoilt=spoilt))
    assert [finding.hosts for finding in found] == [["node0", "node2"], ["node1"]]
    assert found[0].found.startswith("node0, node2: a process may open 64 files")


def test_too_few_open_files() -> None:
    finding = only(find(examination(spoilt={1: {"open_files": 64}})), "error", "open files")
    assert finding.hosts == ["node1"]
    assert "ulimit -n" in finding.advice


def test_findings_survive_hosts_without_facts() -> None:
    """Nothing is known of any host, and that is all that is found, once."""
    healthy = examination(2)
    failure = Failure(kind="silent", text="no answer")
    hosts = [msgspec.structs.replace(h, facts=None, failure=failure) for h in healthy.hosts]
    nothing = Examination(rendezvous="node0", hosts=hosts)
    assert [finding.check for finding in find(nothing)] == ["start"]

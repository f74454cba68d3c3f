"""What each host is to run, how it is reached, and what `foreprop run` says of wrong usage."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foreprop.config.launchers import environment_for_hosts
from foreprop.errors import ConfigError
from foreprop.tools.cli.app import app
from foreprop.tools.run.plan import Plan, check_reachable, hosts_here
from foreprop.tools.run.records import Place
from foreprop.tools.run.resources import Host

HOSTS = (
    Host(name="node0", workers=2, gpus=(0, 2)),
    Host(name="node1", user="me", workers=2, gpus=(4, 5)),
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREPROP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "hosts": HOSTS,
        "here": frozenset({"node0"}),
        "script": ("train.py", "--name", "it's a test"),
        "directory": "/home/me/a project",
        "python": "/opt/python",
        "environment": {},
        "master_address": "node0",
    }
    return Plan(**settings | changes)


# What runs where.
def test_the_task_of_a_host() -> None:
    task = plan(port=1234, environment={"FOREPROP_PRESET": "p3"}).task(1)
    assert task.arguments == [
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2", "--master-addr", "node0"),
        *("train.py", "--name", "it's a test"),
    ]
    assert task.environment == {"FOREPROP_PRESET": "p3", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert (task.host, task.directory, task.port) == ("node1", "/home/me/a project", 1234)


def test_the_task_of_a_host_that_joins() -> None:
    """torchrun is alone there; the place says which ranks its workers have among the others."""
    joins = plan(port=1234, elastic=True).joining_task(1, "node0:29600,node2:29600")
    assert joins.arguments == [
        *("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "train.py", "--name", "it's a test"),
    ]
    assert joins.environment == {
        "FOREPROP_ELASTIC": "True",
        "FOREPROP_JOIN": "node0:29600,node2:29600",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    assert joins.place == Place(node_rank=1, nodes=2, first_rank=2, world_size=4)
    assert (joins.host, joins.port) == ("node1", None)
    assert plan().task(1).place is None


def test_another_host_in_a_place() -> None:
    other = Host(name="node2", workers=2)
    changed = plan().with_host(1, other)
    assert changed.hosts == (HOSTS[0], other)
    assert (list(changed.ranks(1)), changed.command(1)[-2]) == ([2, 3], "node2")


def test_a_host_that_comes_later_has_the_next_ranks() -> None:
    """The world's size stays that of the start, with whatever has to do with it."""
    grown = plan(elastic=True, hosts_at_start=2, most_workers=7).with_host(
        2, Host(name="node2", workers=3)
    )
    assert grown.first_hosts == HOSTS
    joins = grown.joining_task(2, "node0:29600")
    assert joins.place == Place(node_rank=2, nodes=2, first_rank=4, world_size=4)
    assert joins.environment == {
        "FOREPROP_ELASTIC": "True",
        "FOREPROP_JOIN": "node0:29600",
        "FOREPROP_MAX_WORKERS": "7",
    }
    assert grown.environment_of(0)["FOREPROP_MAX_WORKERS"] == "7"


def test_ranks_are_counted_through_the_hosts() -> None:
    hosts = (Host(name="a", workers=4), Host(name="b", workers=6))
    unequal = plan(hosts=hosts, here=frozenset())
    assert [list(unequal.ranks(index)) for index in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert unequal.environment_of(0) == {"FOREPROP_WORKERS_PER_NODE": "2"}
    chosen = plan(hosts=hosts, environment={"FOREPROP_WORKERS_PER_NODE": "1"})
    assert chosen.environment_of(0) == {"FOREPROP_WORKERS_PER_NODE": "1"}


def test_a_module_and_an_ipv6_address() -> None:
    arguments = plan(module=True, script=("pkg.train",), master_address="fe80::1").task(0).arguments
    assert arguments[-4:] == ["--master-addr", "[fe80::1]", "--module", "pkg.train"]


# How it is reached.
def test_this_machine_needs_no_ssh() -> None:
    assert plan().command(0) == ["/opt/python", "-P", "-m", "foreprop.tools.run.host"]


def test_another_machine_is_reached_by_ssh_that_asks_for_nothing() -> None:
    ssh = ("ssh", "-p", "2222", "-o", "ConnectTimeout=99")
    command = plan(ssh=ssh, python="/opt/my python").command(1)
    assert command[: len(ssh)] == list(ssh)
    assert "BatchMode=yes" in command
    assert command.index("ConnectTimeout=99") < command.index("ConnectTimeout=10")  # first wins
    assert command[-2:] == ["me@node1", "exec '/opt/my python' -P -m foreprop.tools.run.host"]


def test_another_runner_gets_login_and_command_only() -> None:
    command = plan(ssh=("/x/run", "a b"), environment={"PYTHONPATH": "/my src"}).command(1)
    python = "/opt/python -P -m foreprop.tools.run.host"
    assert command == ["/x/run", "a b", "me@node1", f"exec env 'PYTHONPATH=/my src' {python}"]


def test_by_hand_it_is_plain_torchrun() -> None:
    """Quoted for the shell here, and for the one there."""
    here, there = (plan(environment={"X": "a b"}).by_hand(index) for index in (0, 1))
    assert here == (
        "cd '/home/me/a project' && env 'X=a b' CUDA_VISIBLE_DEVICES=0,2 /opt/python"
        " -m torch.distributed.run --master-port 29500 --nnodes 2 --node-rank 0"
        " --nproc-per-node 2 --master-addr node0"
        " train.py --name 'it'\"'\"'s a test'"
    )
    *ssh, command = shlex.split(there)
    assert ssh[0] == "ssh"
    assert ssh[-1] == "me@node1"
    assert shlex.split(command)[-3:] == ["train.py", "--name", "it's a test"]


# Who is here.
def test_this_machine_is_known_by_its_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, _: object) -> list[tuple[Any, ...]]:
        if name == "nobody":
            raise socket.gaierror
        address = {"alias": "127.0.1.1", "other": "198.51.100.1"}[name]
        return [(socket.AF_INET, None, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    names = ("localhost", "127.0.0.2", "::1", "192.0.2.7", "alias", "other", "nobody")
    hosts = (*(Host(name=name) for name in names), Host(name=socket.gethostname(), user="me"))
    assert hosts_here(hosts) == {"localhost", "127.0.0.2", "::1", "alias", socket.gethostname()}
    assert not hosts_here((Host(name="localhost", user="root"),))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_the_first_host_must_be_reachable_from_the_others(name: str) -> None:
    hosts = (Host(name=name), Host(name="node1"))
    with pytest.raises(ConfigError, match=f"the first host is '{name}', where no other machine"):
        check_reachable(hosts, frozenset({name}))
    check_reachable(hosts[:1], frozenset({name}))
    check_reachable((Host(name="127.0.0.1"), Host(name="127.0.0.2")), {"127.0.0.1", "127.0.0.2"})


# What of the environment goes along.
def test_settings_and_named_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_PRESET", "kvstore")
    monkeypatch.setenv("FOREPROP_INTERFACE", "eth1")
    monkeypatch.setenv("TOKEN", "secret")
    assert environment_for_hosts(["TOKEN", "A=b=c", "EMPTY=", "FOREPROP_PRESET=p3"]) == {
        "FOREPROP_PRESET": "p3",
        "FOREPROP_INTERFACE": "eth1",
        "TOKEN": "secret",
        "A": "b=c",
        "EMPTY": "",
    }
    monkeypatch.setenv("FOREPROP_INTERFACE", "10.0.0.1")  # this machine's alone
    assert environment_for_hosts() == {"FOREPROP_PRESET": "kvstore"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NOT_SET_ANYWHERE", "which is not set here; set it or say NOT_SET_ANYWHERE=VALUE"),
        ("=1", "it must be NAME or NAME=VALUE"),
        ("A-B=1", "it must be NAME or NAME=VALUE"),
    ],
)
def test_a_bad_variable_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^env is {text!r}.*{message}"):
        environment_for_hosts([text])


# The command.
def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def test_a_dry_run_says_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("198.51.100.1:0,1\nme@198.51.100.2:3,4\n")
    shown = invoke("--resources", str(file), "--dry-run", "train.py", "--dry-run", "--lr", "0.1")
    lines = shown.output.splitlines()
    assert lines[0].startswith("# without --port the port is a free one of the first host")
    assert lines[1] == "# 198.51.100.1 (over ssh): rank 0, 1"
    assert "198.51.100.1 'cd " in lines[2]
    assert lines[3] == "# 198.51.100.2 (over ssh): rank 2, 3"
    assert lines[4].endswith("--master-addr 198.51.100.1 train.py --dry-run --lr 0.1'")


def test_without_a_file_it_is_this_machine() -> None:
    shown = invoke("--workers-per-node", "3", "--port", "1234", "--dry-run", "train.py")
    assert shown.output.splitlines()[0] == "# 127.0.0.1 (this machine): rank 0, 1, 2"
    assert "--master-port 1234 --nnodes 1" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resources", "/none", "x.py"), "--resources is '/none', which cannot be read"),
        (("--ssh", "'", "x.py"), '--ssh is "\'", which no shell could read'),
        (("--ssh", "", "x.py"), "--ssh is ''; it must begin with a program that is here"),
        (("--ssh", "/none -v", "x.py"), "--ssh is '/none -v'; it must begin with a program"),
    ],
)
def test_wrong_usage_is_a_clear_error(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"foreprop: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--elastic", "--nodes", "2:1"), "--nodes is '2:1'; the first number is the smaller one"),
        (("--elastic", "--nodes", "x"), "--nodes is 'x'; it must be MIN:MAX, two whole numbers"),
        (("--elastic", "--nodes", "1:3"), "--nodes is '1:3', and there are 2 hosts; give at most"),
        (("--nodes", "1:2"), "--nodes is '1:2' without --elastic; only an elastic run goes on"),
        (
            ("--elastic", "--nodes", "1:2", "--min-hosts", "1"),
            "--nodes is '1:2', whose first number says what --min-hosts 1 says; leave out",
        ),
        (("--elastic", "--nnodes", "2:1"), "--nnodes is '2:1'; the first number is the smaller"),
    ],
    ids=["order", "no number", "too many", "not elastic", "min hosts", "torchrun's name"],
)
def test_nodes_that_cannot_be(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("198.51.100.1\n198.51.100.2\n")
    result = invoke("--resources", str(file), *arguments, "--dry-run", "train.py")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"foreprop: {message}")


@pytest.mark.parametrize(("nodes", "hosts"), [("1", 1), ("1:1", 1), ("1:2", 2), ("2", 2)])
def test_a_dry_run_has_the_hosts_with_which_it_begins(
    nodes: str, hosts: int, tmp_path: Path
) -> None:
    file = tmp_path / "hosts"
    file.write_text("198.51.100.1\n198.51.100.2\n")
    arguments = ("--resources", str(file), "--elastic", "--nodes", nodes)
    shown = invoke(*arguments, "--dry-run", "train.py").output
    assert shown.count("(over ssh)") == hosts
    assert shown.count(f"--nnodes {hosts} ") == hosts

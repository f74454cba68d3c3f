"""The resource file: what its lines mean, and what is said of bad ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from raised import error_of

from foreprop.errors import ConfigError
from foreprop.tools.run.resources import Host, parse_resources, read_resources


def parse(text: str, workers_per_node: int = 1) -> tuple[Host, ...]:
    return parse_resources(text, source="hosts", workers_per_node=workers_per_node)


def test_a_file_as_the_papers_have_it() -> None:
    """P3's hosts file has names, Parallax's has GPU ids."""
    text = """
    # four machines
    node0:0,1,2,3
    10.0.0.2   workers=2   # in the other rack
    me@node2.example.org
    node3 slots=1
    [fe80::1]:4
    [fe80::2%eth0]
    """
    assert parse(text, workers_per_node=8) == (
        Host(name="node0", workers=4, gpus=(0, 1, 2, 3)),
        Host(name="10.0.0.2", workers=2),
        Host(name="node2.example.org", user="me", workers=8),
        Host(name="node3", workers=1),
        Host(name="fe80::1", workers=1, gpus=(4,)),
        Host(name="fe80::2%eth0", workers=8),
    )


def test_ssh_gets_user_and_name() -> None:
    assert [host.login for host in parse("a\nme@b\n[::1]")] == ["a", "me@b", "::1"]


BAD = {
    "node0:": "the GPU ids are ''; write whole numbers and commas: HOST:0,1,2,3",
    "node0:0,,1": "the GPU ids are '0,,1'; write whole numbers and commas: HOST:0,1,2,3",
    "node0:gpu0": "the GPU ids are 'gpu0'; write whole numbers and commas: HOST:0,1,2,3",
    "node0:-1": "the GPU ids are '-1'; write whole numbers and commas: HOST:0,1,2,3",
    "node0:1,0,1": "the GPU ids are '1,0,1'; name each GPU once",
    "node0:0,1 workers=2": "GPU ids mean one worker each; leave out workers=",
    "node0 workers=0": "'workers=0': the number of workers must be 1 to 1024",
    "node0 workers=": "'workers=': the number of workers must be 1 to 1024",
    "node0 slots=two": "'slots=two': the number of workers must be 1 to 1024",
    "node0 workers=1025": "'workers=1025': the number of workers must be 1 to 1024",
    "node0 workers=99999999999999999999": "the number of workers must be 1 to 1024",
    "node0 workers=" + "9" * 5000: "the number of workers must be 1 to 1024",
    "node0:0,1024": "the GPU ids are '0,1024'; they must be under 1024",
    "node0:" + "9" * 5000: "they must be under 1024",
    "[fe80::1%]": "the zone of fe80::1 is ''; it is an interface's name: %eth0",
    "[fe80::1%-oProxyCommand=x]": "the zone of fe80::1 is '-oProxyCommand=x'; it is",
    "[fe80::1%eth0;date]": "the zone of fe80::1 is 'eth0;date'; it is",
    "[fe80::1%an-interface-of-17]": "the zone of fe80::1 is 'an-interface-of-17'; it is",
    "[node0%eth0]": "an IPv6 address is written in brackets",
    "node0 workers=1 slots=2": "'slots=2': the number of workers is there already",
    "node0 servers=2": "'servers=2' is not known; a line is",
    "node0 4": "'4' is not known; a line is",
    "node0, node1": "the host is 'node0,'; write its name or address",
    ":0,1": "the host is ''; write its name or address",
    "-oProxyCommand=date": "the host is '-oProxyCommand=date'; write its name or address",
    "-l@node0": "the user is '-l'; write USER@HOST",
    "@node0": "the user is ''; write USER@HOST",
    "fe80::1": r"write an IPv6 address in brackets: \[fe80::1\] or",
    "[fe80::1": "an IPv6 address is written in brackets",
    "[fe80::1]0": "an IPv6 address is written in brackets",
    "[node0]": "an IPv6 address is written in brackets",
}


def test_a_bad_line_is_named() -> None:
    for line, told in BAD.items():
        said = error_of(ConfigError, parse, f"first\n\n{line}  # a comment\n")
        assert said.startswith(f"hosts, line 3: {line!r}: ")
        assert re.search(told, error_of(ConfigError, parse, line))


def test_a_host_twice() -> None:
    with pytest.raises(ConfigError, match="hosts, line 4: 'NODE1': line 2 has this host already"):
        parse("node0\nme@node1:0\n\nNODE1")


def test_too_many_workers_in_all() -> None:
    text = "\n".join(f"node{number} workers=1024" for number in range(65))
    with pytest.raises(ConfigError, match="hosts has 66560 workers in all; at most 65536"):
        parse(text)
    with pytest.raises(ConfigError, match="workers_per_node is 99999; at most 1024"):
        parse("node0", workers_per_node=99999)


@pytest.mark.parametrize("text", ["", "\n  \n# nobody\n"])
def test_a_file_without_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match="hosts names no host; write one per line"):
        parse(text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(ConfigError, match=r"which cannot be read: No such file or directory"):
        read_resources(path, workers_per_node=1)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"which cannot be read: it is not text"):
        read_resources(path, workers_per_node=1)
    path.write_text("node0\nnode0\n")
    with pytest.raises(ConfigError, match=f"^{path}, line 2: 'node0': line 1 has this host"):
        read_resources(path, workers_per_node=1)

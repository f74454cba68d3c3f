"""In ssh's place: ``fake_ssh.py [OPTIONS] LOGIN COMMAND`` runs the command on this machine.

``FAKE_SSH`` is a JSON object: ``log``, a file for the logins; ``unreachable``, logins that fail as
a host does that is switched off; ``namespaces``, by login the id of a process in whose network
namespace the command is to run; ``instead``, by login a command to run in place of the one that was
asked for; ``hosts_files``, by login a file that is /etc/hosts there.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_BIND, MS_PRIVATE_EVERYWHERE = 0x1000, 0x44000
SSH_FAILED = 255


def main() -> None:
    login, command = sys.argv[-2:]
    told = json.loads(os.environ["FAKE_SSH"])
    with Path(told["log"]).open("a") as log:
        log.write(f"{login}\n")
    if login in told.get("unreachable", ()):
        print(f"ssh: connect to host {login} port 22: No route to host", file=sys.stderr)
        sys.exit(SSH_FAILED)
    if login in told.get("namespaces", {}):
        enter(told["namespaces"][login])
    if login in told.get("hosts_files", {}):
        replace("/etc/hosts", told["hosts_files"][login])
    os.execvp("sh", ["sh", "-c", told.get("instead", {}).get(login, command)])


def enter(pid: int) -> None:
    """A user without rights has them inside the cluster's user namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ((CLONE_NEWNET, "net"),)
    if os.geteuid():
        kinds = ((CLONE_NEWUSER, "user"), *kinds)
    opened = [(kind, os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)) for kind, name in kinds]
    for kind, namespace in opened:
        if libc.setns(namespace, kind):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)


def replace(path: str, file: str) -> None:
    """For this process and those it starts alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_PRIVATE_EVERYWHERE, None),
        libc.mount(file.encode(), path.encode(), None, MS_BIND, None),
    ):
        if done:
            raise OSError(ctypes.get_errno(), f"cannot put {file} at {path}")


if __name__ == "__main__":
    main()

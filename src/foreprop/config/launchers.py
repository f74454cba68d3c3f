"""What launchers and their processes tell each other, apart from torchrun's own variables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Sequence
from typing import Literal

from foreprop.errors import ConfigError

Foreign = Literal["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"]


def foreign_setting(name: Foreign) -> str | None:
    """A variable of torch's, for ``foreprop doctor`` to show; None if it is not set."""
    return os.environ.get(name)


# settings that ``foreprop run`` sets for its workers: with --elastic, with --nodes where more hosts
# may come, and where a running session is to take a worker in (servers' HOST:PORT, with commas)
ELASTIC = "FOREPROP_ELASTIC"
MAX_WORKERS = "FOREPROP_MAX_WORKERS"
JOIN = "FOREPROP_JOIN"
STEPS_FILE = "FOREPROP_STEPS_FILE"
"""Set by ``foreprop run`` for its workers: where they report their steps, and whom they have lost.
The file is in the memory of the host's agent; without one nobody reads reports."""


def tell_agent(line: bytes) -> None:
    """Report a line of up to 100 bytes, without its end, to the host's agent, if there is one."""
    path = os.environ.get(STEPS_FILE)
    if path is None:
        return
    with contextlib.suppress(OSError):  # the agent has gone, and so will this process
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line + b"\n")
        finally:
            os.close(descriptor)


def report_lost(rank: int, peer: str) -> None:
    """Report that this worker's session has ended because of another process."""
    name = " ".join(peer.split())[:60]
    if name and name != f"rank {rank}":
        tell_agent(b"%d lost %s" % (rank, name.encode("ascii", "backslashreplace")[:80]))


SERVERS_FILE = "FOREPROP_SERVERS_FILE"
"""Set for a worker of an elastic session: the file where it writes its servers' addresses."""


def servers_file() -> str | None:
    return os.environ.get(SERVERS_FILE)


def environment_for_hosts(names: Sequence[str] = ()) -> dict[str, str]:
    """The environment of workers on other machines: the settings, and each ``NAME[=VALUE]``.

    Raises `ConfigError`.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("FOREPROP_")}
    with contextlib.suppress(ValueError):  # an address is this machine's alone; names stay
        ipaddress.ip_address(found.get("FOREPROP_INTERFACE", ""))
        del found["FOREPROP_INTERFACE"]
    for text in names:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"env is {text!r}; it must be NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise ConfigError(f"env is {text!r}, which is not set here; set it or say {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("GROUP_WORLD_SIZE", "GROUP_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("PET_NNODES", "PET_NODE_RANK"),
    ("PET_NPROC_PER_NODE", "LOCAL_RANK"),
)
"""The variables in which launchers say how many processes they start, and which one this is:
torchrun, mpirun of Open MPI, MPICH and MVAPICH, horovodrun, jsrun, flux, srun, and Kubeflow, which
sets them for torchrun."""


def promised_ranks() -> tuple[str, int] | None:
    """A launcher's variable, and its number of ranks, if that is several and this is the first."""
    for size, rank in _LAUNCHERS:
        text = os.environ.get(size, "")
        if text.isdecimal() and int(text) > 1:
            return None if os.environ.get(rank, "0") != "0" else (size, int(text))
    return None

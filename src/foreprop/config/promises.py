"""What launchers say of the number of ranks, in variables that torchrun does not set."""

from __future__ import annotations

import os

_PROMISES = (
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
"""Where launchers say how many processes they start, and which one this is: torchrun, mpirun of
Open MPI, MPICH and MVAPICH, horovodrun, jsrun, flux, srun, and Kubeflow, which is for torchrun."""


def promised_ranks() -> tuple[str, int] | None:
    """A launcher's variable, and its number of ranks, if that is several and this is the first."""
    for size, rank in _PROMISES:
        text = os.environ.get(size, "")
        if text.isdecimal() and int(text) > 1:
            return None if os.environ.get(rank, "0") != "0" else (size, int(text))
    return None

"""What cannot be where servers may count some workers' pushes only: see docs/elastic.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foreprop.core.manifest import MOST_PROCESSES
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config

_VALUES = {
    "architecture": ("ring", "hybrid", "auto"),
    "update": ("workers",),
    "reply": ("notify", "pull"),
    "local_aggregation": ("on",),
    "slice_elems": ("auto",),
}
"""Those that need all workers in each step."""
_GIVEN = "clip_grad_norm compression sparse_parameters rebalance_s".split()
"""The same of settings that are there at all."""
_INSTEAD = {
    "architecture": "servers alone can leave a worker out: use 'ps' or 'p2p'",
    "update": "leave update out: servers update",
    "reply": "use a preset that broadcasts, as p3",
    "local_aggregation": "a node's sum has all its workers: use 'off'",
    "slice_elems": "give a number",
    "clip_grad_norm": "the norm of a step is that of all gradients: use clip_grad_value, or clip"
    " each rank's own in hooks (Tensor.register_hook)",
    "compression": "codecs keep values that all workers have alike: wire_dtype works",
    "sparse_parameters": "rows are updated by all workers together: use dense_parameters",
    "rebalance_s": "slices move when all workers have come to the same step: leave it out",
}


def check_counting(config: Config) -> None:
    """Raises `ConfigError`."""
    if config.buddy_steps is not None and config.state_kept_every is None:
        raise ConfigError(
            f"buddy_steps is {config.buddy_steps!r}, which is for elastic=True with servers beside"
            " the workers: dedicated servers do not die with one"
        )
    _check_most(config)
    given = _given(config)
    name, value = given[0]
    text = f"{name} is {value!r}"
    for other, found in given[1:]:
        raise ConfigError(f"{text}, and {other} is {found!r}: leave out one of them")
    if config.staleness:
        raise ConfigError(
            f"{text}, and staleness is {config.staleness!r}, with which workers are in different"
            " steps anyway: leave out one of them"
        )
    if config.elastic and not config.dedicated_servers:
        _check_beside(config)
    refused = [key for key, values in _VALUES.items() if getattr(config, key) in values]
    refused += [key for key in _GIVEN if getattr(config, key) is not None]
    for key in refused[:1]:
        raise ConfigError(f"{text}, and {key} is {getattr(config, key)!r}: {_INSTEAD[key]}")
    if config.counted_replay is not None and not Path(config.counted_replay).is_dir():
        raise ConfigError(f"counted_replay is {config.counted_replay!r}, which is no folder")


def _check_most(config: Config) -> None:
    most = config.max_workers
    if most is not None and not config.elastic:
        raise ConfigError(
            f"max_workers is {most}, and elastic is False: only an elastic session takes in workers"
            " while it runs; set elastic=True (FOREPROP_ELASTIC), or leave out max_workers"
        )
    if most is not None and most > MOST_PROCESSES:
        raise ConfigError(f"max_workers is {most}; it must be at most {MOST_PROCESSES}")


_BESIDE = {
    "servers_per_node": "a node has one server: leave it out",
    "workers_per_node": "a node that dies has one worker: use dedicated_servers",
    "wire_dtype": "servers have more of the values than workers: use dedicated_servers",
    "ema": "the averages are nowhere else: average in the loop with"
    " torch.optim.swa_utils.AveragedModel, or use dedicated_servers",
    "link_rate_bits_per_s": "a substitute is not on the emulated link: leave it out",
}


def _check_beside(config: Config) -> None:
    """With servers beside the workers: what would die with a node."""
    usual = {"servers_per_node": (1,), "workers_per_node": (None, 1)}
    for key, instead in _BESIDE.items():
        value = getattr(config, key)
        if value not in usual.get(key, (None,)):
            raise ConfigError(
                f"elastic is True, servers are beside the workers, and {key} is {value!r}:"
                f" {instead}"
            )


def _given(config: Config) -> list[tuple[str, object]]:
    names = ("elastic", "backup_workers", "counted_replay")
    return [(name, getattr(config, name)) for name in names if getattr(config, name)]

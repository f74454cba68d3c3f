"""Who has divided the data already: marks that samplers and data sets of others bear."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from foreprop.cluster.world import World
from foreprop.errors import ConfigError

_RANKS = ("rank", "_rank", "process_index", "process_rank")
_SIZES = ("num_replicas", "_num_replicas", "world_size", "_world_size", "num_processes")

_STREAMING = ("streaming", "litdata")
"""Packages whose Streaming... classes ask torchrun's variables for their share."""


@dataclass(frozen=True, slots=True)
class _Division:
    """What somebody else divides by; ``make`` is how to make it for another rank."""

    owner: str
    rank: int
    size: int
    make: str


def check_divided(source: Any, world: World) -> bool:
    """Whether ``source`` gives every rank its own share already.

    Raises `ConfigError` if it does, but for another rank or number of ranks than this world's, and
    for webdataset pipelines that are not divided by node.
    """
    for found in _divisions(source):
        if (found.rank, found.size) != (world.rank, world.size):
            raise ConfigError(
                f"{found.owner} divides the data for rank {found.rank} of {found.size}, but this is"
                f" rank {world.rank} of {world.size}: "
                + found.make.format(rank=world.rank, size=world.size)
            )
        return True
    kind = type(getattr(source, "dataset", source))
    return kind.__name__.startswith("Streaming") and kind.__module__.split(".")[0] in _STREAMING


def _divisions(source: Any) -> Iterator[_Division]:
    yield from _accelerated(source)
    for part in _parts(source):
        rank, size = _first_int(part, _RANKS), _first_int(part, _SIZES)
        if rank is not None and size is not None and size > 1:  # for one is not divided yet
            make = (
                f"make {type(part).__name__} for rank {{rank}} of {{size}}, or leave it out and"
                " give shard() what it divides"
            )
            yield _Division(type(part).__name__, rank, size, make)
        node = vars(part).get("_distributed") if hasattr(part, "__dict__") else None
        if node is not None and node.world_size > 1:  # Hugging Face's
            make = "say split_dataset_by_node(dataset, rank={rank}, world_size={size})"
            yield _Division("split_dataset_by_node", node.rank, node.world_size, make)
    yield from _webdataset(source)


def _parts(source: Any) -> Iterator[Any]:
    """What may bear a mark: samplers, and data sets that are read in order."""
    names = ("sampler", "batch_sampler")
    samplers = [getattr(source, name, None) for name in names]
    inner = [getattr(part, name, None) for part in samplers for name in names]
    dataset = getattr(source, "dataset", None)
    datasets = [dataset, getattr(dataset, "dataset", None)]
    streams = [part for part in datasets if isinstance(part, IterableDataset)]
    for part in (source, *samplers, *inner, *streams):
        if part is not None and type(part) is not BatchSampler:
            yield part


def _first_int(part: Any, names: tuple[str, ...]) -> int | None:
    values = vars(part) if hasattr(part, "__dict__") else {}
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _accelerated(source: Any) -> Iterator[_Division]:
    """Accelerate divides whatever it prepares, if it knows of several processes."""
    if type(source).__module__.startswith("accelerate."):
        state = sys.modules["accelerate"].PartialState()
        if state.num_processes > 1:
            make = "start accelerate and foreprop with the same ranks, as torchrun does"
            yield _Division("accelerate", state.process_index, state.num_processes, make)


def _webdataset(source: Any) -> Iterator[_Division]:
    """Pipelines shuffle by generators that nobody can seed, so only they can divide their files."""
    stages = pipeline_stages(source) or pipeline_stages(getattr(source, "dataset", None))
    if not stages:
        return
    if isinstance(stages[0], DataLoader):  # a WebLoader
        yield from _divisions(stages[0])
        return
    library = sys.modules["webdataset"]
    own = library.split_by_node in stages or isinstance(stages[0], library.ResampledShards)
    if not own or library.single_node_only in stages:
        raise ConfigError(
            "this webdataset pipeline does not divide its files among the ranks: give WebDataset"
            " nodesplitter=webdataset.split_by_node, and .with_epoch(n) so that every rank makes"
            " n steps; if it does divide them, say shard(loader, divided=True)"
        )
    rank, size, _, _ = library.utils.pytorch_worker_info()
    make = "set RANK={rank} and WORLD_SIZE={size}, as torchrun does"
    yield _Division("webdataset.split_by_node", rank, size, make)


def pipeline_stages(source: Any) -> list[Any]:
    """A webdataset pipeline's; none of anything else."""
    library = sys.modules.get("webdataset")
    if library is None or not isinstance(source, library.DataPipeline):
        return []
    stages: list[Any] = source.pipeline
    return stages

"""A model's embeddings: which of their tables servers may hold row by row.

A table is *row-wise* if the user asks for it (``sparse_parameters``, or ``sparse=True`` of its
module), if ``architecture="auto"`` decides so, or if it is *remote*: on the meta device, so that
only servers have memory for it. Its gradients are sparse then, for as long as the session lasts.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from foreprop.config import Config
from foreprop.core.manifest import Aggregation, ParameterInfo, RowInit
from foreprop.core.rowinit import row_init_of
from foreprop.errors import ConfigError
from foreprop.features.tables.rowtable import check_row_wise

Named = Sequence[tuple[str, torch.nn.Parameter, int]]
"""Parameters with their names and groups, see `engine.optimizer.named_parameters`."""

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class Embeddings:
    """The embeddings of a model among the optimizer's parameters.

    Raises `ConfigError` if the settings, or ``sparse=True``, ask for what cannot be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        named: Named,
        optimizer: torch.optim.Optimizer,
        config: Config,
    ) -> None:
        self._optimizer = optimizer
        self._modules: dict[str, list[Any]] = {}
        found = {id(parameter): (name, group) for name, parameter, group in named}
        self._group_of: dict[str, int] = {}
        for module in model.modules():
            if isinstance(module, EMBEDDINGS) and id(module.weight) in found:
                name, group = found[id(module.weight)]
                self._modules.setdefault(name, []).append(module)
                self._group_of[name] = group
        self._made_sparse: list[Any] = []
        # all by the tables' names
        self.sparse = {name for name, own in self._modules.items() if any(m.sparse for m in own)}
        """The tables whose gradients are sparse, as the user has made the modules."""
        self._check_optimizer(self.sparse)
        self.row_wise = self._asked_for(config)
        """The tables that servers hold row by row from the start."""
        self.remote = self._find_remote(named, config)
        """The remote tables among them, and how their rows begin."""
        self.candidates = self._find_candidates(config)
        """The tables about which ``architecture="auto"`` decides."""
        self.make_sparse(self.row_wise)

    def _find_remote(self, named: Named, config: Config) -> dict[str, RowInit]:
        names = [name for name, parameter, _ in named if parameter.is_meta]
        if others := [f"parameter {name}" for name in names if name not in self.row_wise]:
            raise ConfigError(_meta_text(others))
        return {
            name: row_init_of(
                name,
                config.table_init,
                seed=config.table_seed,
                padding_row=self._modules[name][0].padding_idx,
            )
            for name in names
        }

    def modules_of(self, name: str) -> Sequence[Any]:
        return self._modules[name]

    def make_sparse(self, names: Collection[str]) -> None:
        """Make these tables' gradients sparse, until `restore`."""
        for name in names:
            for module in self._modules[name]:
                if not module.sparse:
                    module.sparse = True
                    module.weight.grad = None  # a dense one would make the next one dense
                    self._made_sparse.append(module)

    def restore(self) -> None:
        while self._made_sparse:
            self._made_sparse.pop().sparse = False

    def _check_optimizer(self, names: Collection[str]) -> None:
        check_row_wise(self._optimizer, {name: self._group_of[name] for name in names})

    def _asked_for(self, config: Config) -> set[str]:
        if config.architecture == "ring":
            return set()
        wanted = {name for name in self._modules if _matches(name, config.sparse_parameters)}
        wanted |= {name for name in self.sparse if not _matches(name, config.dense_parameters)}
        self._check_row_wise(wanted)
        return wanted

    def _check_row_wise(self, names: Collection[str]) -> None:
        self._check_optimizer(names)
        refused: dict[str, str] = {}  # the tables' names, by what they have
        for name in sorted(names):
            for module in self._modules[name]:
                for option in ("max_norm", "scale_grad_by_freq"):
                    value = getattr(module, option)
                    if value is not None and value is not False:
                        refused[f"{option}={value} of {name}"] = name
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}, which cannot be done by rows; leave it out, or name"
                f" {', '.join(dict.fromkeys(refused.values()))} in dense_parameters"
            )

    def _find_candidates(self, config: Config) -> set[str]:
        found: set[str] = set()
        if config.architecture != "auto":
            return found
        for name in self._modules:
            if _matches(name, config.dense_parameters) or _matches(name, config.sparse_parameters):
                continue
            with contextlib.suppress(ConfigError):
                self._check_row_wise([name])
                found.add(name)
        return found


def check_rest(model: torch.nn.Module, named: Named) -> None:
    """Raise `ConfigError` if a tensor on the meta device is not the optimizer's."""
    ours = {id(parameter) for _, parameter, _ in named}
    if others := [what for what, tensor in on_meta(model) if id(tensor) not in ours]:
        raise ConfigError(_meta_text(others))


def on_meta(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors without memory, each behind what to call it."""
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if tensor.is_meta:
                yield f"{kind} {name}", tensor


_LISTED = 20  # a whole model may be on the meta device: not more names than anybody reads


def are_listed(names: Sequence[str]) -> str:
    """The names, with "is" or "are"."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more} {'is' if len(names) == 1 else 'are'}"


def _meta_text(names: Sequence[str]) -> str:
    return (
        f"{are_listed(names)} on the meta device, where only the weights of embeddings may be that"
        " have sparse=True (or are named in sparse_parameters), are in the optimizer, and are held"
        " row by row by servers (any architecture but 'ring'). Otherwise memory and values come"
        " first: module.to_empty(device='cpu'), then initialise them"
    )


def check_kind(info: ParameterInfo, aggregation: Aggregation, *, sparse: bool) -> None:
    """Raise `ConfigError` for a sparse, or dense, gradient that is to be reduced as the other kind.

    How the ranks reduce it is agreed on before there is a gradient, by what the modules say.
    """
    reduction_of = aggregation.reduction_of
    if reduction_of(sparse=sparse) == reduction_of(sparse=info.sparse):
        return
    if sparse:
        why = "sparse, but it is not the weight of an embedding with sparse=True"
        todo = "make it one"
    else:
        why = "dense, but it is the weight of an embedding with sparse=True"
        todo = "say sparse=False"
    raise ConfigError(
        f"reduction is {aggregation.reduction!r}, sparse_reduction is"
        f" {aggregation.sparse_reduction!r}, and the gradient of {info.name} is {why}: {todo}, or"
        " give both the same value"
    )


def _matches(name: str, patterns: str | None) -> bool:
    split = (pattern.strip() for pattern in (patterns or "").split(","))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in split if pattern)

"""The user's model and optimizer: which of their parameters are synchronised, and as what."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from foreprop.config import Config
from foreprop.core.manifest import ITEMSIZE_BYTES, NO_GROUP, ParameterInfo, RowInit
from foreprop.errors import ConfigError
from foreprop.hooks.interception import check_unmanaged, managed_ids
from foreprop.hooks.modelhooks import ModelBuffers
from foreprop.path.optimizer import named_parameters, others_named

if TYPE_CHECKING:
    from foreprop.tables.embeddings import Embeddings

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)

Named = tuple[str, torch.nn.Parameter, int]
"""A parameter's name, itself, and the number of its group in the optimizer."""


class Belongings:
    """What belongs to the user. Parameters go by their numbers: the optimizer's come first."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
    ) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters())
        self._own = list(named_parameters(model, self.optimizer))
        self.optimized = len(self._own)
        """The number of parameters that the optimizer has."""
        self.embeddings = self._find_embeddings(config)
        self.named: list[Named] = []
        self.buffers = ModelBuffers(model)

    def _find_embeddings(self, config: Config) -> Embeddings | None:
        """None if the model has no tables, and nothing that would have to be one."""
        model = self.model
        tensors = itertools.chain(
            model.parameters(), model.buffers(), (parameter for _, parameter, _ in self._own)
        )
        has_tables = any(isinstance(module, _EMBEDDINGS) for module in model.modules())
        is_asked = config.sparse_parameters is not None
        if not (has_tables or is_asked or any(tensor.is_meta for tensor in tensors)):
            return None
        from foreprop.tables.embeddings import Embeddings

        return Embeddings(model, self._own, self.optimizer, config)

    @property
    def row_wise(self) -> Collection[str]:
        """The names of the tables that servers hold row by row from the start."""
        return () if self.embeddings is None else self.embeddings.row_wise

    @property
    def candidates(self) -> Collection[str]:
        """The names of those that ``architecture="auto"`` decides about."""
        return () if self.embeddings is None else self.embeddings.candidates

    @property
    def has_dense(self) -> bool:
        """Whether the optimizer has other parameters than tables held row by row."""
        return self.optimized > len(self.row_wise)

    def take(self) -> None:
        """Number the parameters. Raises `ConfigError` for those that cannot be synchronised."""
        if self.embeddings is not None:
            from foreprop.tables.embeddings import check_rest

            check_rest(self.model, self._own)
        check_unmanaged(self._own)
        others = others_named(self.model, self.optimizer)
        self.named = self._own + [entry for entry in others if id(entry[1]) not in managed_ids()]
        self._managed_ids = {id(parameter) for _, parameter, _ in self.named} | managed_ids()

    @property
    def frozen(self) -> list[torch.nn.Parameter]:
        """The model's parameters that no session has."""
        return [p for p in self.model.parameters() if id(p) not in self._managed_ids]

    def infos(self, row_wise: Collection[str], *, by_workers: bool) -> Iterator[ParameterInfo]:
        """What all ranks must agree on. ``row_wise``: names; ``by_workers``: they update."""
        tables = self.embeddings
        sparse: Collection[str] = () if tables is None else tables.sparse
        remote: Mapping[str, RowInit] = {} if tables is None else tables.remote
        for name, parameter, group in self.named:
            rows = name in row_wise
            yield ParameterInfo(
                dtype=_checked_dtype(name, parameter),
                name=name,
                shape=tuple(parameter.shape),
                group=NO_GROUP if by_workers and not rows else group,
                rows=rows,
                sparse=name in sparse,
                init=remote.get(name),
            )

    def make_sparse(self, names: Collection[str]) -> None:
        """Have these tables' gradients be sparse, until `restore`."""
        if self.embeddings is not None:
            self.embeddings.make_sparse(names)

    def restore(self) -> None:
        """Embeddings' gradients are as the user had them."""
        if self.embeddings is not None:
            self.embeddings.restore()


def _checked_dtype(name: str, parameter: torch.nn.Parameter) -> str:
    """Raises `ConfigError` for a parameter that cannot be sent."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE_BYTES:
        raise ConfigError(
            f"parameter {name} is {dtype}; parameters must be one of {sorted(ITEMSIZE_BYTES)}"
        )
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(
            f"parameter {name} is not initialised yet (a lazy module): run one forward pass"
            " before parallelize()"
        )
    return dtype

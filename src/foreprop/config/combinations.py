"""Settings that cannot go together: one table, read by `Config`, `parallelize`, docs and tests.

A row refuses each pair of one of its `these` with one of its `those`. Both are features: settings
with some of their values, or what only `parallelize` sees of the model, the optimizer and the
world. To lift a refusal is to delete a row, or a name in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foreprop.core.codec import NONE, is_automatic, kind_of, may_be_lossy
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Feature(NamedTuple):
    """A setting that has one of ``values``; without them, one that is neither None, 0 nor False.

    A ``test`` may decide instead. The documentation writes the feature as ``shown``.
    """

    setting: str = ""
    values: tuple[object, ...] = ()
    test: Callable[[Config], object] | None = None
    shown: str = ""

    def is_asked(self, config: Config) -> bool:
        if self.test is not None:
            return bool(self.test(config))
        value = getattr(config, self.setting) if self.setting else None
        return value in self.values if self.values else bool(value)

    def text(self, config: Config) -> str:
        return f"{self.setting} is {getattr(config, self.setting)!r}"

    def documented(self) -> str:
        if self.shown:
            return self.shown
        values = ", ".join(map(repr, self.values))
        return f"`{self.setting}={values}`" if values else f"`{self.setting}`"


def _found(shown: str) -> Feature:
    """A feature that no setting asks for, and `parallelize` finds."""
    return Feature(test=lambda config: False, shown=shown)


def _codec(shown: str, *but: str) -> Feature:
    def test(config: Config) -> bool:
        kinds = {kind_of(codec) for _, codec in config.codecs} - {NONE, *but}
        return is_automatic(config.compression) or bool(kinds)

    return Feature("compression", test=test, shown=f"`compression`{shown}")


def _is_elastic_beside(config: Config) -> bool:
    return config.elastic and not config.dedicated_servers


def _may_be_dgc(config: Config) -> bool:
    if is_automatic(config.compression):
        return kind_of(str(config.compression).partition(":")[2]) == "dgc"
    return any(kind_of(codec) == "dgc" for _, codec in config.codecs)


FEATURES: Mapping[str, Feature] = {
    "p2p": Feature("architecture", ("p2p",)),
    "ring": Feature("architecture", ("ring",)),
    "hybrid": Feature("architecture", ("hybrid",)),
    "architecture auto": Feature("architecture", ("auto",)),
    "dedicated": Feature("dedicated_servers"),
    "slices auto": Feature("slice_elems", ("auto",)),
    "workers": Feature("update", ("workers",)),
    "servers": Feature("update", ("servers",)),
    "arrays": Feature("granularity", ("array",)),
    "fifo": Feature("order", ("fifo",)),
    "one lane": Feature("lanes", ("one",)),
    "asked for": Feature("reply", ("notify", "pull")),
    "pulled": Feature("reply", ("pull",)),
    "own placement": Feature("placement", ("kvstore", "strict_round_robin")),
    "aggregation": Feature("local_aggregation", ("on",)),
    "encryption": Feature("encryption"),
    "link rate": Feature("link_rate_bits_per_s"),
    "node rates": Feature("node_rates"),
    "late nodes": Feature("late_nodes"),
    "rebalance": Feature("rebalance_s"),
    "rows": Feature("sparse_parameters"),
    "staleness": Feature(
        "staleness",
        test=lambda config: config.staleness not in (0, "late"),
        shown="`staleness` of a number or `'async'`",
    ),
    "async": Feature("staleness", ("async",)),
    "late": Feature("staleness", ("late",)),
    "in step": Feature("staleness", (0, "late")),
    "delay compensation": Feature(
        "delay_compensation", test=lambda config: config.delay_compensation is not None
    ),
    "elastic": Feature("elastic", (True,)),
    "fixed": Feature("elastic", (False,)),
    "max workers": Feature("max_workers"),
    "backup": Feature("backup_workers"),
    "replay": Feature("counted_replay"),
    "join": Feature("join"),
    "clip norm": Feature("clip_grad_norm"),
    "clip value": Feature("clip_grad_value"),
    "ema": Feature("ema"),
    "wire": Feature("wire_dtype"),
    "codecs": _codec(""),
    "codecs auto": Feature(
        "compression",
        test=lambda config: is_automatic(config.compression),
        shown="`compression='auto'`",
    ),
    "lossy codecs": Feature(
        "compression",
        test=lambda config: config.compression and may_be_lossy(str(config.compression)),
        shown="`compression` of codecs that are not exact",
    ),
    "dgc": Feature("compression", test=_may_be_dgc, shown="`compression` of `dgc`"),
    "lossy sums": Feature(
        "compression",
        test=lambda config: (
            config.architecture in ("ring", "hybrid", "auto")
            and may_be_lossy(str(config.compression or NONE))
        ),
        shown="`compression` of codecs that are not exact, with `ring` or `hybrid`",
    ),
    "unsummed codecs": _codec(" other than `bf16`, `fp16`, `randomk`", "randomk"),
    "unsummed lossy codecs": _codec(
        " other than `bf16`, `fp16`, `randomk`, `lossless`", "randomk", "lossless"
    ),
    "check stale": Feature("check_stale"),
    "elastic beside": Feature(
        "elastic", test=_is_elastic_beside, shown="`elastic=True`, without `dedicated_servers`"
    ),
    "elastic node's servers": Feature(
        "servers_per_node",
        test=lambda config: _is_elastic_beside(config) and config.servers_per_node not in (None, 1),
        shown="`servers_per_node` other than 1, without `dedicated_servers`",
    ),
    # found by parallelize
    "no optimizer": _found("no optimizer"),
    "scaler": _found("a GradScaler given to `parallelize`"),
    "tables": _found("tables that servers hold row by row"),
    "tables beside workers": _found("such tables, where workers update the rest"),
    "remote tables": _found("tables on the meta device"),
    "nccl": _found("NCCL"),
    "device": _found("parameters on a device"),
}
"""All features, by the names that rows have for them."""


class Refused(NamedTuple):
    """A row: two groups of features that do not go together.

    If that is not ``by_nature``, nobody has built it yet.
    """

    these: tuple[str, ...]
    those: tuple[str, ...]
    reason: str
    instead: str
    by_nature: bool = True

    def text(self, one: str, other: str) -> str:
        return f"{one}, and {other}: {self.reason}; {self.instead}"


def _refused(these: str, those: str, *texts: str, by_nature: bool = True) -> Refused:
    reason, instead = texts
    return Refused(_names(these), _names(those), reason, instead, by_nature)


def _not_yet(these: str, those: str, *texts: str) -> Refused:
    return _refused(these, those, *texts, by_nature=False)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


_COUNTED = "elastic, backup, replay"
_ANY_STALE = "staleness, late"
_SERVED = "use architecture='p2p' or 'ps'"
_LEAVE_OUT = "leave out one of them"
_ADDED_UP = (
    "collectives add up codes on their way, which takes bf16 or fp16 for all parameters, or"
    " randomk, whose elements all ranks draw alike"
)
_OWN_HOOKS = "clip each rank's own gradients in hooks (Tensor.register_hook)"

REFUSED: tuple[Refused, ...] = (
    # Collectives: what only servers can do.
    _refused("ring, hybrid", _COUNTED, "servers alone can leave a worker out", _SERVED),
    _refused(
        "ring, hybrid", _ANY_STALE, "collectives add up all ranks' gradients of one step", _SERVED
    ),
    _refused(
        "ring, hybrid",
        "encryption",
        "torch's collectives send in the clear",
        f"{_SERVED}, or leave encryption out and put the machines into a VPN (docs/security.md)",
    ),
    _refused(
        "ring, hybrid",
        "link rate",
        "foreprop paces its own connections, not torch.distributed's",
        f"{_SERVED}, or leave link_rate_bits_per_s out",
    ),
    _refused("ring, hybrid", "rebalance", "slices move between servers", _SERVED),
    _refused(
        "ring",
        "aggregation",
        "ranks in a ring are ordered by node, so each gradient crosses a link about once anyway",
        "leave local_aggregation out, or use servers",
    ),
    _refused("ring", "rows", "a ring has no servers to hold rows", "use architecture='hybrid'"),
    _refused("ring", "unsummed codecs", _ADDED_UP, _SERVED),
    _refused(
        "hybrid", "unsummed lossy codecs", f"{_ADDED_UP}; of a table's rows lossless", _SERVED
    ),
    _refused(
        "codecs",
        "nccl",
        "the elements of codes are chosen on the host, and NCCL sums on GPUs",
        "set collectives='gloo', or leave compression out",
    ),
    # Where servers are.
    _refused(
        "p2p, ring",
        "dedicated",
        "there are no dedicated servers in this architecture",
        "use architecture='ps', or leave one of them out",
    ),
    _refused(
        "dedicated, own placement",
        "node rates, late nodes, rebalance",
        "these have servers beside the workers own what suits their nodes",
        "leave out one of them (placement: use 'round_robin')",
    ),
    _not_yet(
        "rebalance",
        "aggregation",
        "where a node's sum is pushed nobody sees whose link is slow",
        _LEAVE_OUT,
    ),
    # Who updates.
    _refused(
        "workers",
        f"{_ANY_STALE}, backup",
        "servers decide which pushes become an update",
        "leave update out: then servers update",
    ),
    _refused(
        "workers",
        "dgc",
        "dgc accumulates the optimizer's momentum, which a step of the worker's would make again",
        "use topk, or leave update out: then servers update, without momentum",
    ),
    _not_yet(
        "workers",
        "lossy sums",
        "collectives take each round of a step for a step, and residuals are of steps that count",
        "use architecture='p2p' or 'ps', or leave update out: then each rank updates its shards",
    ),
    _refused(
        "tables beside workers",
        "clip norm, clip value, ema, scaler",
        "servers update the rows of tables, whose gradients no worker sees",
        "leave update out, with an optimizer that servers can apply; or clip in the loop, and use"
        " the scaler as in a script without foreprop",
    ),
    _refused(
        "no optimizer",
        "clip norm, clip value, ema, scaler, servers",
        "that is part of optimizer.step()",
        "give parallelize() the optimizer, or leave it out (update='workers')",
    ),
    # Some workers' pushes only.
    _refused(
        "elastic",
        "replay",
        "a replay counts whom its log names, so all of them must be here",
        "leave elastic out: a replay has as many workers as the session had in all",
    ),
    _refused(
        _COUNTED, _ANY_STALE, "with staleness workers are in different steps anyway", _LEAVE_OUT
    ),
    _not_yet(
        "max workers, join",
        "rows, tables",
        "a worker that comes later is not told which rows it begins with",
        "name the tables in dense_parameters, or begin again from a checkpoint with more workers",
    ),
    _refused(
        "backup, async",
        "rebalance",
        "slices move after a step that no rank has made when all are told, and ranks may be any"
        " number of steps apart",
        "leave out one of them, or set staleness to a number of steps",
    ),
    _refused(
        "replay",
        "rebalance",
        "a log says by server whose pushes its slices count",
        "leave rebalance_s out: the log is replayed where its slices were",
    ),
    _refused(
        _COUNTED,
        "aggregation",
        "a node's sum has all its workers",
        "use local_aggregation='off', or leave it out",
    ),
    _refused(
        _COUNTED,
        "asked for",
        "whoever is late gets values that were updated without it",
        "use a preset that broadcasts, as p3",
    ),
    _refused(
        "max workers",
        "fixed",
        "only an elastic session takes in workers while it runs",
        "set elastic=True (FOREPROP_ELASTIC), or leave max_workers out",
    ),
    _refused(
        "join", "link rate", "the emulated link of a lost worker is gone", "leave out one of them"
    ),
    _refused("elastic", "elastic node's servers", "a node has one server", "leave it out"),
    _refused(
        "elastic beside",
        "servers, rows, tables, dgc",
        "what servers beside the workers keep is lost with a node",
        "use dedicated_servers; or leave all to the workers (update left out, dense_parameters)",
    ),
    _refused(
        "elastic beside",
        "backup",
        "servers decide which pushes become an update, and what they keep is lost with a node",
        "use dedicated_servers, or leave one of them out",
    ),
    # Workers apart.
    _refused(
        "staleness",
        "clip norm, clip value",
        "each rank's push is an update by itself, and there is no sum of a step to clip",
        _OWN_HOOKS,
    ),
    _not_yet(
        "delay compensation",
        "rows, tables",
        "servers do not keep which rows each rank was sent",
        "name them in dense_parameters, or leave delay_compensation out",
    ),
    _refused(
        "staleness",
        "asked for",
        "each rank has its values when its own push is an update",
        "use a preset that broadcasts, as p3",
    ),
    _refused("staleness", "aggregation", "each rank's push is an update by itself", "leave it out"),
    _refused(
        "late",
        "pulled",
        "answers land beside the parameters, whenever they come",
        "use a preset that broadcasts, as p3",
    ),
    _not_yet(
        "late",
        "device",
        "answers land beside parameters that are in host memory",
        "give a number of steps",
    ),
    _refused(
        "delay compensation",
        "in step",
        "all gradients of a step are summed",
        "set staleness to a number of steps or 'async', or leave delay_compensation out",
    ),
    # The rest.
    _refused("clip norm", "clip value", "a gradient is clipped by one rule", "set one of them"),
    _refused(
        "codecs, late",
        "check stale",
        "check_stale overwrites values that must stay, to find who reads them",
        "leave out the other one while you look for readers",
    ),
    _refused(
        "one lane", "fifo", "one lane goes by priority", "set order='priority', or leave lanes out"
    ),
)
"""The table, to be read from above: the first row that refuses a pair says why."""


def check_combinations(config: Config, found: Mapping[str, str] = _NOTHING) -> None:
    """Raise `ConfigError` for a pair that the table has.

    ``found`` are the features that `parallelize` sees, each with its words for the error.
    """
    asked = {name: FEATURES[name].text(config) for name in asked_for(config)} | dict(found)
    for row in REFUSED:
        one = next((asked[name] for name in row.these if name in asked), None)
        other = next((asked[name] for name in row.those if name in asked), None)
        if one is not None and other is not None:
            raise ConfigError(row.text(one, other))


def asked_for(config: Config) -> Iterator[str]:
    return (name for name, feature in FEATURES.items() if feature.is_asked(config))


def refused_with(name: str) -> set[str]:
    """The features that do not go together with this one."""
    found = [row.those for row in REFUSED if name in row.these]
    found += [row.these for row in REFUSED if name in row.those]
    return {each for names in found for each in names}


def settled(config: Config, found: Collection[str] = ()) -> dict[str, Any]:
    """The values of settings that are ``auto`` where the others leave nothing to choose.

    ``found`` are the features that `parallelize` sees.
    """
    asked = {*asked_for(config), *found}
    changes: dict[str, Any] = {}
    if config.architecture == "auto" and asked & _ONLY_SERVED:
        changes["architecture"] = "ps" if "dedicated" in asked else "p2p"
    loses = "lossy codecs" in asked and not is_automatic(config.compression)
    if config.slice_elems == "auto" and (asked & _NOT_CUT_ANEW or loses):
        changes["slice_elems"] = None
    return changes


_LEFT_TO_PLANS = {"dedicated", "aggregation", "rebalance", "rows"}
_ONLY_SERVED = {*refused_with("ring"), "lossy codecs", "remote tables"} - _LEFT_TO_PLANS
"""The features that need servers, so that `plan.planning` has no architecture to choose."""
_NOT_CUT_ANEW = {
    *_names(f"ring, hybrid, arrays, dedicated, {_COUNTED}, {_ANY_STALE}"),
    "remote tables",
}
"""The features without slices, or whose slices cannot change while a session runs: that would begin
anew, and only servers have the rows of remote tables."""

"""foreprop: priority-based parameter propagation (P3) for PyTorch.

session = foreprop.parallelize(model, optimizer)
loader = foreprop.shard(loader)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreprop.config import PRESETS, Config
from foreprop.errors import (
    ConfigError,
    ForepropError,
    HandshakeError,
    InternalError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    StepTimeout,
    StorageError,
    TrainingLoopError,
    TransportError,
)
from foreprop.version import __version__

if TYPE_CHECKING:
    from foreprop.conformance import check_codec, check_optimizer
    from foreprop.engine.optimizer import register_optimizer
    from foreprop.features.compression.codecs import register_codec
    from foreprop.plan.profiler import profile
    from foreprop.session.composition import parallelize
    from foreprop.session.saving import checkpoint
    from foreprop.session.session import Session
    from foreprop.session.shard import shard

__all__ = [
    "PRESETS",
    "Config",
    "ConfigError",
    "ForepropError",
    "HandshakeError",
    "InternalError",
    "LocalProtocolError",
    "PeerLost",
    "RemoteProtocolError",
    "Session",
    "StepTimeout",
    "StorageError",
    "TrainingLoopError",
    "TransportError",
    "__version__",
    "check_codec",
    "check_optimizer",
    "checkpoint",
    "parallelize",
    "profile",
    "register_codec",
    "register_optimizer",
    "shard",
]

_LOADED_WHEN_USED = {
    "check_codec": "conformance",
    "check_optimizer": "conformance",
    "checkpoint": "session.saving",
    "parallelize": "session.composition",
    "profile": "plan.profiler",
    "register_codec": "features.compression.codecs",
    "register_optimizer": "engine.optimizer",
    "Session": "session.session",
    "shard": "session.shard",
}


def __getattr__(name: str) -> Any:
    # the training side is loaded at its first use: a server has none, and starts in half the time
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"foreprop.{_LOADED_WHEN_USED[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]  # without the submodules that happen to be loaded

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
    from foreprop.auto.profiler import profile
    from foreprop.compression.codecs import register_codec
    from foreprop.conformance import check_codec, check_optimizer
    from foreprop.data.shard import shard
    from foreprop.path.ownoptimizers import register_optimizer
    from foreprop.session.saving import checkpoint
    from foreprop.session.session import Session, parallelize

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
    "parallelize": "session.session",
    "profile": "auto.profiler",
    "register_codec": "compression.codecs",
    "register_optimizer": "path.ownoptimizers",
    "Session": "session.session",
    "shard": "data.shard",
}


def __getattr__(name: str) -> Any:
    """Load the training side at its first use: a server has none, and starts in half the time."""
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"foreprop.{_LOADED_WHEN_USED[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What users call; not the submodules that happen to be loaded."""
    return [*__all__]

"""foreprop: priority-based parameter propagation (P3) for PyTorch.

session = foreprop.parallelize(model, optimizer)
loader = foreprop.shard(loader)
"""

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
    TrainingLoopError,
    TransportError,
)
from foreprop.training.parallelize import parallelize
from foreprop.training.session import Session
from foreprop.training.shard import shard
from foreprop.version import __version__

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
    "TrainingLoopError",
    "TransportError",
    "__version__",
    "parallelize",
    "shard",
]

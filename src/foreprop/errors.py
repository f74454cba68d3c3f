"""The one error tree. Every message names the field or peer, the value, and what to do."""

from __future__ import annotations


class ForepropError(Exception):
    """Base of everything that foreprop raises on purpose."""


class ConfigError(ForepropError, ValueError):
    """A setting, model or optimizer that cannot be used; names the field and what is allowed."""


class HandshakeError(ConfigError):
    """Two processes of a session disagree on version, model, optimizer, settings or world size."""


class TrainingLoopError(ForepropError, RuntimeError):
    """The training loop did something that would silently give wrong results; says what to do."""


class LocalProtocolError(ForepropError):
    """This process broke the protocol's rules: a defect of foreprop or of its caller."""


class RemoteProtocolError(ForepropError):
    """A peer sent bytes that the protocol does not allow; its connection is closed."""


class TransportError(ForepropError, OSError):
    """A connection broke or could not be made. It is dead: nothing more is sent on it."""


class PeerLost(TransportError):
    """A worker or server went away while others still needed it; names it and its last step."""

    def __init__(self, message: str, *, peer: str = "", step: int = -1) -> None:
        super().__init__(message)
        self.peer = peer
        self.step = step


class StepTimeout(ForepropError, TimeoutError):
    """A step made no progress in time; names stage, peer, step, parameter and seconds waited."""


class StorageError(ForepropError, OSError):
    """A file or folder that was asked for cannot be written; names it."""


class InternalError(ForepropError):
    """An invariant does not hold; carries the last events (the machine's story)."""

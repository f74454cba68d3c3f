"""The one error tree. Every message names the field or peer, the value, and what to do.

`Failure` is an error as it travels between processes: who, when, what.
"""

from __future__ import annotations

import msgspec


class ForepropError(Exception):
    """The base of everything that foreprop raises on purpose."""


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


# Errors as they travel between processes.
_KINDS: dict[str, type[ForepropError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        HandshakeError,
        InternalError,
        PeerLost,
        RemoteProtocolError,
        StepTimeout,
        StorageError,
        TrainingLoopError,
        TransportError,
    )
}
_MESSAGE_LIMIT = 10_000


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a session ended. ``peer`` names the process to blame, empty if there is none."""

    kind: str
    message: str
    peer: str = ""
    step: int = -1

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def as_error(self) -> ForepropError:
        kind = _KINDS.get(self.kind, InternalError)
        if kind is PeerLost:
            return PeerLost(self.message, peer=self.peer, step=self.step)
        return kind(self.message)


_DECODER = msgspec.json.Decoder(Failure)


def decode_failure(data: bytes | memoryview) -> Failure:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a failure report: {error}") from error


def failure_of(error: BaseException, *, by: str = "") -> Failure:
    """What to tell other processes about an error; ``by`` names this process.

    An error that is not foreprop's own ends this process, so for others it is a `PeerLost`.
    """
    kind = type(error).__name__
    peer, step = (error.peer, error.step) if isinstance(error, PeerLost) else ("", -1)
    text = str(error) or repr(error)
    if by and not isinstance(error, ForepropError):
        peer, text = by, f"{by} ended: {kind}" + f": {error}" * bool(str(error))
        kind = "PeerLost"
    elif by and not text.startswith(("rank ", "server ")):
        text = f"{by}: {text}"
    if kind not in _KINDS:
        kind = "TransportError" if isinstance(error, OSError) else "InternalError"
    return Failure(
        kind=kind,
        # lone surrogates (of file names that are not UTF-8) cannot be sent
        message=text[:_MESSAGE_LIMIT].encode(errors="backslashreplace").decode(),
        peer=peer,
        step=step,
    )


# What to type for foreprop-lab, or an extra, with all its packages: no package index has foreprop.
INSTALL_LAB = "pip install ./lab in a clone of foreprop"


def how_to_install(extra: str) -> str:
    return f"pip install '.[{extra}]' in a clone of foreprop"


def own_error(error: BaseException, rank: int) -> ForepropError:
    """The error that later calls of this rank raise, after ``error`` has ended the session."""
    if isinstance(error, ForepropError):
        return error
    wrapped = failure_of(error, by=f"rank {rank}").as_error()
    wrapped.__cause__ = error
    return wrapped

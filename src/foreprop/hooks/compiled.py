"""Compiled code (`torch.compile`): wait at its entry.

Dynamo's guards compare the classes of the parameters and its traces follow them, so both must see
ordinary parameters. Whatever is compiled (a model, a submodule, a function, before or after
`parallelize`), all parameters of this thread's sessions are settled when it is entered. Where that
entry is missed (another thread, a torch without it), the waiting class refuses to be compiled.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch._dynamo.eval_frame as eval_frame

from foreprop.hooks.interception import Interception

_ENTRY = "install_generation_tagging_init"  # called by every compiled region as it is entered


class Enterable(Protocol):
    def compiled_code_entered(self) -> None:
        """Compiled code is about to run in this thread."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.sessions: list[weakref.ref[Enterable]] = []


_here = _Here()

WAITS_AT_ENTRY = hasattr(eval_frame, _ENTRY)


def _entering(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered()
        return run(*args, **kwargs)

    return wrapper


def entered() -> None:
    """Code that must see ordinary parameters is about to run in this thread."""
    for reference in _here.sessions:
        session = reference()
        if session is not None:
            session.compiled_code_entered()


_INTERCEPTION = Interception(eval_frame, _ENTRY, _entering)


def watch_entries(session: Enterable) -> Callable[[], None]:
    """Tell the session, in this thread, about compiled code; the returned function ends it."""
    sessions, reference = _here.sessions, weakref.ref(session)
    sessions.append(reference)
    release = _INTERCEPTION.hold() if WAITS_AT_ENTRY else lambda: None

    def stop() -> None:
        sessions.remove(reference)
        release()

    return stop

"""What is replaced in torch and in Python while a session is open, and given back afterwards.

Functions of torch (`Interception`), among them the entries of compiled code and of TorchScript,
which must see ordinary parameters, and other libraries' wrappers, which would average what the
open sessions have; and Python's hooks for errors that nobody catches.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, Protocol

import torch
import torch._dynamo.eval_frame as eval_frame
from torch.nn.parallel import DistributedDataParallel

from foreprop.errors import ConfigError

_lock = threading.Lock()


class Interception:
    """Puts ``wrap(original)`` in a function's place for as long as anybody holds it.

    ``owner``: its module or class; a class may inherit it.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._owner = owner
        self._name = name
        self._wrap = wrap
        self._original: Any = None  # as the owner has it
        self._ours: Any = None
        self._inherited = False
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """Put it in place; the returned function ends this hold."""
        with _lock:
            self._holders += 1
            if self._holders == 1:
                original = getattr(self._owner, self._name)
                self._inherited = self._name not in vars(self._owner)
                self._original = vars(self._owner).get(self._name, original)
                self._ours = self._wrap(original)
                setattr(self._owner, self._name, self._ours)
        return self._release

    def _release(self) -> None:
        with _lock:
            self._holders -= 1
            if self._holders or vars(self._owner).get(self._name) is not self._ours:
                return
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)


# Compiled code (`torch.compile`). Whatever is compiled, this thread's sessions are told when it is
# entered; `compiled`, loaded then, has parameters wait inside. Where that entry is missed (a torch
# without it), the waiting class refuses to be compiled.
class Enterable(Protocol):
    def compiled_code_entered(self, everything: bool) -> None:
        """Compiled code is about to run in this thread, or what needs ordinary parameters."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.sessions: list[weakref.ref[Enterable]] = []


_here = _Here()
_COMPILED = "install_generation_tagging_init"  # called by every compiled region as it is entered
WAITS_AT_ENTRY = hasattr(eval_frame, _COMPILED)


def _entering_compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered()
        return run(*args, **kwargs)

    return wrapper


def entered(everything: bool = False) -> None:
    """Compiled code, or what must see ordinary parameters, is about to run in this thread."""
    for reference in _here.sessions:
        session = reference()
        if session is not None:
            session.compiled_code_entered(everything)


_ENTRY = Interception(eval_frame, _COMPILED, _entering_compiled)


def watch_entries(session: Enterable) -> Callable[[], None]:
    """Tell the session, in this thread, about compiled code; the returned function ends it."""
    sessions, reference = _here.sessions, weakref.ref(session)
    sessions.append(reference)
    release = _ENTRY.hold() if WAITS_AT_ENTRY else lambda: None

    def stop() -> None:
        sessions.remove(reference)
        release()

    return stop


# TorchScript (`torch.jit`), `torch.func`: entries are watched; `hooks.scripted` is loaded then.
_SCRIPTED = {
    torch._C.ScriptFunction: ("__call__", "save", "save_to_buffer"),
    torch._C.ScriptMethod: ("__call__",),
    torch._C.ScriptModule: (
        *("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"),
        *("__copy__", "__deepcopy__"),
    ),
    torch._C: ("_freeze_module", "_save_jit_module", "_save_jit_module_to_bytes"),
    torch._functorch.eager_transforms: ("_wrap_for_grad", "_wrap_functional_tensor"),
    torch._functorch.vmap: ("_add_batch_dim",),
}


def _entering_script(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        from foreprop.hooks.scripted import run_settled

        return run_settled(run, args, kwargs)

    return wrapper


_SCRIPT_ENTRIES = [
    Interception(owner, name, _entering_script)
    for owner, names in _SCRIPTED.items()
    for name in names
    if hasattr(owner, name)
]


def watch_scripts() -> list[Callable[[], None]]:
    """Have scripted code wait, in every thread; the returned functions end it."""
    return [interception.hold() for interception in _SCRIPT_ENTRIES]


# An error that nobody catches is told to the other ranks at once. The process may stay for long
# after it, for other threads that are not daemons: the interpreter waits for those before it calls
# what is registered with `atexit`.
class GivesUp(Protocol):
    """A session, as far as it is needed here."""

    @property
    def thread_id(self) -> int:
        """The training thread."""

    def give_up(self, error: BaseException) -> None: ...


def watch_uncaught_errors(sessions: Collection[GivesUp]) -> None:
    """Once per process. What was there to show such errors is called as before, first."""
    show, show_in_thread = sys.excepthook, threading.excepthook

    def give_up(error: BaseException | None) -> None:
        for session in list(sessions):
            if error is not None and session.thread_id == threading.get_ident():
                session.give_up(error)

    def on_error(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        try:
            show(kind, error, trace)
        finally:
            give_up(error)

    def on_error_in_thread(about: threading.ExceptHookArgs) -> None:
        try:
            show_in_thread(about)
        finally:
            give_up(about.exc_value)

    sys.excepthook, threading.excepthook = on_error, on_error_in_thread


# Nothing is averaged twice: whose parameters these are. Other libraries' wrappers around the model
# or the optimizer would average them, too; `hooks.wrappers`, loaded where there is one, takes them
# off.
class Owner(Protocol):
    """A session."""

    def give_away(self, parameter: torch.Tensor) -> bool:
        """Another session's optimizer has it; False if this one's has it too."""


_managed: dict[int, tuple[str, weakref.ref[Owner]]] = {}
"""By the parameter's id: its name in the session, and the session."""


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether an open session has the parameter."""
    return id(parameter) in _managed


def managed_ids() -> Set[int]:
    return _managed.keys()


def claim_parameter(name: str, parameter: torch.Tensor, owner: Owner) -> None:
    _managed[id(parameter)] = (name, weakref.ref(owner))


def release_parameter(parameter: torch.Tensor, owner: Owner) -> None:
    """Nobody has it any more, unless it is another session's by now."""
    _, reference = _managed.get(id(parameter), ("", None))
    if reference is not None and reference() is owner:
        del _managed[id(parameter)]


def check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    """Take over what another session only reads; refuse what it updates."""
    for name, parameter, _ in named:
        if id(parameter) not in _managed:
            continue
        theirs, reference = _managed[id(parameter)]
        session = reference()
        if session is None or not session.give_away(parameter):
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {theirs}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


EXCHANGING = ("deepspeed", "horovod", "fairscale", "apex")
"""Libraries whose modules and optimizers exchange gradients themselves."""
SHOWING = ("accelerate.optimizer", "lightning.", "lightning_fabric.", "pytorch_lightning.")
_WRAPPING = ("torch.nn.parallel", "torch.distributed", *EXCHANGING)


def bare_model(model: torch.nn.Module, *, alone: bool = True) -> torch.nn.Module:
    """What is to be trained in ``model``; `ConfigError` for what cannot be, by so many ranks."""
    if not any(_may_wrap(module) for module in model.modules()):
        return model
    from foreprop.hooks.wrappers import unwrap_model

    return unwrap_model(model, alone=alone)


def _may_wrap(module: torch.nn.Module) -> bool:
    kinds = [*type(module).__mro__, *(type(p.data) for p in module.parameters(recurse=False))]
    wraps = any(kind.__module__.startswith(_WRAPPING) for kind in kinds)
    return wraps or isinstance(module, torch.nn.SyncBatchNorm)


def bare_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer in accelerate's or Lightning's; `ConfigError` if it communicates itself."""
    if not type(optimizer).__module__.startswith((*SHOWING, *EXCHANGING)):
        return optimizer
    from foreprop.hooks.wrappers import unwrap_optimizer

    return unwrap_optimizer(optimizer)


def watch_wrappers() -> list[Callable[[], None]]:
    """From now on wrappers around synchronised models only pass on; the functions end that."""
    return [interception.hold() for interception in _INTERCEPTIONS]


def _led_past(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of DistributedDataParallel: `hooks.wrappers` has what is done instead."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
            from foreprop.hooks.wrappers import INSTEAD

            return INSTEAD[name](original, self, *arguments, **options)

        return method

    return wrap


_INTERCEPTIONS = [
    Interception(DistributedDataParallel, name, _led_past(name))
    for name in ("__init__", "forward", "join", "register_comm_hook")
]

"""What is replaced in torch and in Python while a session is open, and given back afterwards.

An `Interception` replaces one function of torch for as long as any session holds it. Among them are
the entries of compiled code and of TorchScript, which must see ordinary parameters: the sessions of
the thread are called there, and have parameters wait (`features.compiled`, `params.scripted`).
Where a torch does not have that entry, the waiting class refuses to be compiled.

Python's hooks for errors that nobody catches are replaced for good (`watch_uncaught_errors`).

Nothing is averaged twice: this module also knows which parameters the open sessions have. Each has
claimed its own, by the parameter's id, with a method that gives it away to another session.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo.eval_frame as eval_frame

from foreprop.errors import ConfigError

_lock = threading.Lock()


class Interception:
    """Puts ``wrap(original)`` in a function's place for as long as anybody holds it.

    ``owner`` is the function's module or class; a class may inherit it.
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
        """Put it in place, if it is not; the returned function ends this hold."""
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


class OwnHook:
    """A session's hook on the user's objects. A copy of it does nothing."""

    def before_copy(self) -> None:
        """Prepare for the module that has the hook to be pickled or copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # which any Python can load


# Compiled code (`torch.compile`).
class _ThreadWatchers(threading.local):
    def __init__(self) -> None:
        self.methods: list[weakref.WeakMethod[Callable[[bool], None]]] = []


_watchers = _ThreadWatchers()
_COMPILED = "install_generation_tagging_init"  # called by every compiled region as it is entered
WAITS_AT_ENTRY = hasattr(eval_frame, _COMPILED)


def _wrap_compiled_entry(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call_watchers()
        return run(*args, **kwargs)

    return wrapper


def call_watchers(everything: bool = False) -> None:
    """Tell this thread's sessions that compiled code is about to run.

    ``everything``: it is code that must see all parameters as ordinary ones.
    """
    for reference in _watchers.methods:
        watch = reference()
        if watch is not None:
            watch(everything)


_ENTRY = Interception(eval_frame, _COMPILED, _wrap_compiled_entry)


def watch_entries(watch: Callable[[bool], None]) -> Callable[[], None]:
    """Have `call_watchers` of this thread call a method; the returned function ends that."""
    methods, reference = _watchers.methods, weakref.WeakMethod(watch)
    methods.append(reference)
    release = _ENTRY.hold() if WAITS_AT_ENTRY else lambda: None

    def stop() -> None:
        methods.remove(reference)
        release()

    return stop


# TorchScript (`torch.jit`) and `torch.func`.
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


def _wrap_script_entry(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        from foreprop.params.scripted import run_settled

        return run_settled(run, args, kwargs)

    return wrapper


_SCRIPT_ENTRIES = [
    Interception(owner, name, _wrap_script_entry)
    for owner, names in _SCRIPTED.items()
    for name in names
    if hasattr(owner, name)
]


def watch_scripts() -> list[Callable[[], None]]:
    """Have parameters wait at the entry of scripted code; the returned functions end that."""
    return [interception.hold() for interception in _SCRIPT_ENTRIES]


# The other ranks learn of an error that nobody catches at once. The process may stay for long after
# it, for other threads that are not daemons: the interpreter waits for those before it calls what
# is registered with `atexit`.
def watch_uncaught_errors(give_up: Callable[[BaseException], None]) -> None:
    """Call ``give_up`` in a thread that an error ends, after what shows the error; for good."""
    show, show_in_thread = sys.excepthook, threading.excepthook

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
            if about.exc_value is not None:
                give_up(about.exc_value)

    sys.excepthook, threading.excepthook = on_error, on_error_in_thread


# Whose parameters these are.
GiveAway = Callable[[torch.Tensor], bool]
"""A session's method that gives a parameter away; False if its own optimizer has it."""
_managed: dict[int, tuple[str, weakref.WeakMethod[GiveAway]]] = {}  # with the name in its session


def is_managed(parameter: torch.Tensor) -> bool:
    return id(parameter) in _managed


def managed_ids() -> Set[int]:
    return _managed.keys()


def claim_parameter(name: str, parameter: torch.Tensor, give_away: GiveAway) -> None:
    _managed[id(parameter)] = (name, weakref.WeakMethod(give_away))


def release_parameter(parameter: torch.Tensor, give_away: GiveAway) -> None:
    # it may be another session's by now
    _, reference = _managed.get(id(parameter), ("", None))
    if reference is not None and reference() == give_away:
        del _managed[id(parameter)]


def check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    """Take over what another session only averages; raise `ConfigError` for what it updates."""
    for name, parameter, _ in named:
        if id(parameter) not in _managed:
            continue
        theirs, reference = _managed[id(parameter)]
        give_away = reference()
        if give_away is None or not give_away(parameter):
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {theirs}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


EXCHANGING = ("deepspeed", "horovod", "fairscale", "apex")
"""Libraries whose modules and optimizers exchange gradients themselves."""
SHOWING = ("accelerate.optimizer", "lightning.", "lightning_fabric.", "pytorch_lightning.")

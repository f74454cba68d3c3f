"""How inductor is to compile our graphs: kernels without the interpreter lock, in their order.

torch's own operators run without it. Inductor's C++ kernels, fused from several of them, are called
from Python by bindings that keep it (`torch._inductor.codecache`). Meanwhile no other thread can
start a frame or take one in, so the link idles for as long as a kernel computes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from foreprop.compiled.operators import GRADIENT_DONE
from foreprop.hooks.interception import Interception

_LOCKED = "kernel({}); Py_RETURN_NONE;"
"""The call as torch writes it into a kernel's bindings, for `str.format`: ``{}`` reads Python's
arguments, and so needs the lock."""
_UNLOCKED = (
    "[](auto... arguments) {{"
    " struct Unlocked {{"
    " PyThreadState* const thread = PyEval_SaveThread();"
    " ~Unlocked() {{ PyEval_RestoreThread(thread); }}"
    " }} unlocked;"
    " kernel(arguments...);"
    " }}({}); Py_RETURN_NONE;"
)


def _without_lock(call: Any) -> Any:
    return _UNLOCKED if call == _LOCKED else call  # of another torch: as it is


@functools.cache
def _bindings(codecache: Any) -> Interception:
    return Interception(codecache.CppPythonBindingsCodeCache, "call_entry_function", _without_lock)


@contextlib.contextmanager
def unlocked_kernels() -> Iterator[None]:
    """What inductor compiles meanwhile, or loads from its cache, computes the same without it.

    No other compiler is loaded for it, nor touched.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if not hasattr(codecache, "CppPythonBindingsCodeCache"):
        yield
        return
    release = _bindings(codecache).hold()
    try:
        yield
    finally:
        release()


def lower_readers_first() -> None:
    """Have inductor make what reads a parameter, or a gradient, before it says that it is done.

    By itself inductor puts off what it may fuse until somebody needs it. An operator of ours that
    writes to memory which such an operation reads would make it, but behind itself
    (`FallbackKernel`), and so have it read what has landed. Its own collectives do as we do here.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if hasattr(lowering, "register_lowering") and GRADIENT_DONE not in lowering.lowerings:
        _register(lowering)


def _register(lowering: Any) -> None:
    from torch._inductor.virtualized import V

    operator = lowering.fallback_handler(GRADIENT_DONE, add_to_fallback_set=False)

    def done(readers: Sequence[Any], gradient: Any, output: int) -> Any:
        for tensor in (*readers, gradient):
            tensor.realize()
            V.graph.mark_buffer_mutated(tensor.get_name())
        return operator(readers, gradient, output)

    lowering.register_lowering(GRADIENT_DONE, type_promotion_kind=None)(done)


def in_given_order() -> contextlib.AbstractContextManager[Any]:
    """What inductor compiles meanwhile runs in its graph's order, where fusion allows it.

    Its last pass would have what takes memory for long, as gradients do, computed as late as
    possible. The kernels are made before that pass, and are the same.
    """
    config = sys.modules.get("torch._inductor.config")
    if not hasattr(config, "reorder_for_peak_memory"):
        return contextlib.nullcontext()
    patched: Any = config
    kept: contextlib.AbstractContextManager[Any] = patched.patch(reorder_for_peak_memory=False)
    return kept

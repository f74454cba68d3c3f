"""Gradients of the host that are copied before they leave, as a GPU's are, without a GPU.

The device is a thread of C++ (`copying.cpp`), which copies in the order in which it is asked, and
needs no interpreter. The native plane looks for the number that it writes behind each copy; the
Python plane has a thread of Python's wait for each. The averages go no way back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foreprop.engine.gpumemory import AsyncStagedMemory, CountingAccelerator, Stager
from foreprop.engine.memory import Copying
from foreprop.errors import ConfigError
from foreprop.session.session import ConnectedSession

_SOURCE = Path(__file__).with_name("copying.cpp")


class _Over(NamedTuple):
    """The event at a copy's end."""

    copier: Copier
    number: int

    def synchronize(self) -> None:
        self.copier.wait(self.number)


class Copier(CountingAccelerator):
    """What `AsyncStagedMemory` asks of a device with one stream; `close` ends its threads.

    Raises `ConfigError` where there is no compiler.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._library = _compiled()
        self._copier = self._library.copier_new()
        self._word = self._library.copier_word(self._copier)
        self._asked = 0
        self.stager = Stager(self)

    def close(self) -> None:
        self.stager.stop()
        self._library.copier_free(self._copier)

    def wait(self, number: int) -> None:
        self._library.copier_wait(self._copier, number)

    def host_memory(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return True

    def current_stream(self) -> None:
        """There is one."""

    def mark(self, *, timed: bool = False) -> Any:
        return _Over(self, self._asked)

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> Any:
        self.start_counted([(target, source)], here)
        return self.mark()

    def start_counted(self, copies: Iterable[tuple[Any, Any]], here: Any) -> Copying:
        for target, source in copies:
            about = (target.data_ptr(), source.data_ptr(), source.nbytes)
            self._library.copier_ask(self._copier, *about)
            self._asked += 1
        return Copying(self._word, self._asked, lambda: None)


def stage(session: ConnectedSession, copier: Copier) -> None:
    """Have all gradients copied before they leave, from now on."""
    averaging = session._training.averaging
    if averaging is None:
        raise ConfigError("gradients are staged where workers update: set update='workers'")
    for gradient in averaging.gradients:
        arrival = gradient.arrival
        arrival.memory = AsyncStagedMemory(arrival.owner.parameter, copier.stager)
        arrival.memory.counts = arrival._is_lent


@functools.cache
def _compiled() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ConfigError("a device's copies are C++ here: install g++, or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "copying.so"
        command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, "-o", str(built), str(_SOURCE)], check=True)
        library = ctypes.CDLL(str(built))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.copier_new.restype = library.copier_word.restype = pointer
    library.copier_free.argtypes = library.copier_word.argtypes = [pointer]
    library.copier_ask.argtypes = [pointer, pointer, pointer, ctypes.c_size_t]
    library.copier_wait.argtypes = [pointer, number]
    return library

"""What torchrun starts for a comparison: one rank of the user's script, on one system.

``python -m foreprop.tools.compare.rank TASK SCRIPT [ARGUMENTS]``; ``TASK`` is a `Task` in JSON.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import threading
import traceback
from pathlib import Path

import msgspec
import numpy as np
import torch

from foreprop.config import Config, launch_info
from foreprop.config.launchers import foreign_setting
from foreprop.tools.compare.recorder import Recorder, counted_interface, interface_to
from foreprop.tools.compare.records import Began, Ended, RecordWriter, Task, chunks
from foreprop.tools.compare.standin import Enough, StandIn
from foreprop.tools.compare.systems import CONTENDERS

_LINGER_S = 30.0
"""How long a script that is ended may take before its process is ended."""


class Rank:
    def __init__(self, task: Task) -> None:
        config, info = Config.resolve(), launch_info()
        self._task, self._rank = task, info.rank
        self._records = RecordWriter(os.dup(1))  # the script may close or redirect its own
        self._interface = counted_interface(config)
        if foreign_setting("GLOO_SOCKET_IFNAME") is None:  # DDP takes the link that foreprop takes
            os.environ["GLOO_SOCKET_IFNAME"] = interface_to(info.master_address, config)
        self._recorder = Recorder(warm_up=task.warm_up, steps=task.steps, interface=self._interface)
        self._standin = StandIn(
            task.system,
            self._recorder,
            began=lambda about: self._records.write(Began(rank=self._rank, about=about)),
            ended=self._write_result,
            backend=task.backend,
            find_unused=task.find_unused,
        )

    def run(self, script: str, arguments: list[str]) -> int:
        if self._task.seed is not None:
            seed(self._task.seed * 1000 + self._rank)
        self._standin.install()
        error = self._run(script, arguments)
        if error is None and self._standin.is_ready:
            self._standin.finish()
        elif error is not None:
            self._write_end(error=f"{type(error).__name__}: {error}")
            traceback.print_exception(error)
            sys.last_value = error  # so that a session tells the other ranks why
            if not CONTENDERS[self._task.system].is_ours:
                sys.stderr.flush()
                os._exit(1)  # before DDP's process group is taken apart
            return 1
        else:
            self._write_end()
        return 0

    def _run(self, script: str, arguments: list[str]) -> BaseException | None:
        """Run the script; what it has raised, if that is an error."""
        sys.argv = [script, *arguments]
        try:
            if self._task.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(script).resolve().parent)
                runpy.run_path(script, run_name="__main__")
        except Enough:
            self._end_soon()
        except SystemExit as ended:
            return ended if ended.code else None
        except BaseException as error:
            return error
        return None

    def _end_soon(self) -> None:
        """End the process even if threads that the script has started would keep it."""

        def end() -> None:
            sys.stderr.flush()
            os._exit(0)

        timer = threading.Timer(_LINGER_S, end)
        timer.daemon = True
        timer.start()

    def _write_result(self, digest: str) -> None:
        losses, seconds = self._recorder.losses(), self._recorder.seconds()
        self._records.write(*chunks(self._rank, losses, seconds))
        self._write_end(digest=digest)

    def _write_end(self, *, error: str = "", digest: str = "") -> None:
        counted = self._recorder.counted()
        self._records.write(
            Ended(
                rank=self._rank,
                steps=self._recorder.count,
                error=error,
                is_ready=self._standin.is_ready,
                digest=digest,
                interface=self._interface,
                sent_bytes=counted.sent_bytes,
                waited_s=counted.waited_s,
                cpu_share=counted.cpu_share,
            )
        )


def seed(number: int) -> None:
    """Seed all generators that scripts draw from; a script that seeds them does so after this."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def main() -> int:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    return Rank(task).run(sys.argv[2], sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())

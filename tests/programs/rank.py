"""What torchrun starts: one rank of one program, in a copy of its folder of its own."""

from __future__ import annotations

import builtins
import json
import os
import random
import runpy
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.programs import standins
from tests.programs.baseline import Baseline, change_ddp
from tests.programs.program import FOREPROP, REBUCKETED
from tests.programs.recorder import Enough, Recorder


def main(folder: Path) -> int:
    """Run the program that ``folder`` describes; results go there, too."""
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    rank = int(os.environ["RANK"])
    copy = folder / f"rank-{rank}"
    shutil.copytree(folder / "program", copy)
    script = copy / task["path"]
    os.chdir(script.parent)
    sys.path[0] = str(script.parent)
    sys.argv = [script.name, *task["arguments"]]
    if task["variant"] != FOREPROP and not task["group"]:
        dist.init_process_group("gloo")
    recorder = Recorder(task["steps"])
    vars(builtins)["recorder"] = recorder
    if task["variant"] != FOREPROP:
        change_ddp(**({"bucket_cap_mb": 0.02} if task["variant"] == REBUCKETED else {}))
    vars(builtins)["baseline"] = Baseline(rebucketed=task["variant"] == REBUCKETED)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    standins.install(task["stand_ins"])
    error = _run(script)
    recorder.write(folder, rank, error)
    code = 1 if error else 0
    if task["variant"] != FOREPROP:
        sys.stdout.flush()
        os._exit(code)  # before DDP's process group is taken apart
    return code


def _run(script: Path) -> str:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Enough:
        pass
    except SystemExit as ended:
        return f"SystemExit: {ended.code}" if ended.code else ""
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # so that the session tells the other ranks why
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Run the tests with other Pythons and other torches; docs/versions.md says what has been run.

python scripts/versions.py                       every Python that is found, torch as it is pinned
python scripts/versions.py --python 3.13 --torch 2.14.1 --torch 2.13.0

Each pair gets an environment of its own in runs/versions, by pip, with its settings. On Linux the
plain package index serves torch with CUDA (gigabytes): for the CPU build set TORCH_INDEX, as for
make. What cannot be had is left out, and the reason is said.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
UNIT = [
    *"tests/unit --ignore tests/unit/test_lightning.py".split(),
    *"--ignore tests/unit/test_huggingface_ways_in.py".split(),
    *("-m", "not long and not process and not lab and not network"),
]
"""What scripts/check runs."""
PROCESSES = [
    *"tests/process/test_torchrun.py tests/process/test_examples.py".split(),
    *"tests/conformance/test_same_bits.py tests/conformance/test_compile.py".split(),
    *("tests/faults/test_lost_peers.py", "-m", "not long"),
]
"""Several processes, servers, the same bits, compiled code, and what is lost."""
_PIP_LIMIT_S, _TESTS_LIMIT_S = 1800, 3600


class Unavailable(Exception):
    """What cannot be had here, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one pair: what was asked for and found, and what pytest said last, or why not."""

    python: str
    torch: str
    said: str
    passed: bool | None = None
    """None: not run."""


def find_interpreter(asked: str) -> str:
    """A path, or a version such as 3.13: on PATH, or one of pyenv's. Raises `Unavailable`."""
    if os.sep in asked:
        if not os.access(asked, os.X_OK):
            raise Unavailable(f"{asked} is no program")
        return asked
    if found := shutil.which(f"python{asked}"):
        return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    number, threads = asked.removesuffix("t"), "t" if asked.endswith("t") else ""
    of_pyenv = sorted(root.glob(f"{number}.*{threads}/bin/python"), key=_patch)
    of_pyenv = [path for path in of_pyenv if path.parts[-3].endswith("t") == bool(threads)]
    if not of_pyenv:
        raise Unavailable(f"no python{asked} on PATH, and none in {root}")
    return str(of_pyenv[-1])


def _patch(interpreter: Path) -> list[int]:
    parts = interpreter.parts[-3].removesuffix("t").split(".")
    return [int(part) for part in parts if part.isdecimal()]


def make_environment(interpreter: str, folder: Path, torch: str) -> Path:
    """Its python; one that has all already is left as it is. Raises `Unavailable`, as pip says."""
    python = folder / "bin" / "python"
    if not python.exists():
        _call([interpreter, "-m", "venv", str(folder)])
    elif versions_of(python)[1].partition("+")[0] == torch:
        return python
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if not line.startswith("torch==")))
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    wanted = ["-c", str(pins), f"torch=={torch}", "-e", f"{ROOT}[dev]"]
    _call([str(python), "-m", "pip", "install", "-q", *extra, *wanted])
    return python


def _call(command: Sequence[str]) -> None:
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if made.returncode:
        raise Unavailable(reason_of(made.stderr) or f"{command[0]} ended with {made.returncode}")


def versions_of(python: Path) -> tuple[str, str]:
    """Python's and torch's; no torch where it, or foreprop, cannot be imported."""
    ask = "import platform, torch, foreprop; print(platform.python_version(), torch.__version__)"
    said = subprocess.run(
        [str(python), "-c", ask], stdout=subprocess.PIPE, text=True, check=False
    ).stdout.split()
    return (said[0], said[1]) if len(said) == 2 else ("", "")


def reason_of(said: str) -> str:
    """pip's last error, which names what it could not find."""
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR: " in line]
    return errors[-1] if errors else said.strip().rpartition("\n")[2]


def run_tests(python: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all passed, and pytest's last line."""
    ran = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TESTS_LIMIT_S,
        check=False,
    )
    sys.stdout.write(ran.stdout)
    return ran.returncode == 0, ran.stdout.strip().rpartition("\n")[2].strip("= ")


def try_pair(asked: str, torch: str) -> Outcome:
    folder = RUNS / f"{asked.strip('/').replace('/', '-')}-torch-{torch}"
    try:
        python = make_environment(find_interpreter(asked), folder, torch)
    except Unavailable as missing:
        return Outcome(asked, torch, str(missing))
    own, torch_version = versions_of(python)
    if not torch_version:
        return Outcome(asked, torch, "torch or foreprop cannot be imported", passed=False)
    results = [run_tests(python, tests) for tests in (UNIT, PROCESSES)]
    said = "; ".join(words for _, words in results)
    return Outcome(own, torch_version, said, passed=all(passed for passed, _ in results))


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, as docs/versions.md has it."""
    words = {True: "passed", False: "FAILED", None: "not run"}
    rows = [f"| {o.python} | {o.torch} | {words[o.passed]}: {o.said} |" for o in outcomes]
    return "\n".join(["| Python | torch | result |", "|---|---|---|", *rows])


def pinned_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if what was run passed, and something was."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--python", action="append", help="a version, or a path; repeat it")
    options.add_argument("--torch", action="append", help="a version, as 2.13.0; repeat it")
    asked = options.parse_args(arguments)
    outcomes = [
        try_pair(python, torch)
        for torch in asked.torch or [pinned_torch()]
        for python in asked.python or PYTHONS
    ]
    print(table(outcomes))
    ran = [outcome.passed for outcome in outcomes if outcome.passed is not None]
    return 0 if ran and all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())

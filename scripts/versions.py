"""Run the tests with other Pythons and other torches; docs/versions.md says what has been run.

python scripts/versions.py                       every Python that is found, torch as it is pinned
python scripts/versions.py --python 3.13 --torch 2.14.1 --torch 2.13.0

pip installs an environment for each pair in runs/versions, with its settings. On Linux the plain
package index serves torch with CUDA (gigabytes): for the CPU build set TORCH_INDEX, as for make. A
pair that is unavailable is left out, with the reason.
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
    *"tests/unit --ignore tests/unit/integrations/test_lightning.py".split(),
    *"--ignore tests/unit/integrations/test_huggingface_ways_in.py".split(),
    *("-m", "not long and not process and not lab and not network"),
]
"""The unit tests that scripts/check runs."""
PROCESSES = [
    *"tests/process/test_torchrun.py tests/process/test_examples.py".split(),
    *"tests/conformance/test_same_bits.py tests/conformance/test_compile.py".split(),
    *("tests/faults/test_lost_peers.py", "-m", "not long"),
]
"""Tests of several processes, servers, equal bits, compiled code, and lost peers."""
_PIP_LIMIT_S, _TESTS_LIMIT_S = 1800, 3600


class Unavailable(Exception):
    """Something is not available on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one pair; ``message`` is pytest's last line, or why it did not run."""

    python: str
    torch: str
    message: str
    passed: bool | None = None
    """Whether the tests passed; None if they were not run."""


def find_interpreter(wanted: str) -> str:
    """The interpreter of a path, or of a version such as 3.13, on PATH or among pyenv's.

    Raises `Unavailable`.
    """
    if os.sep in wanted:
        if not os.access(wanted, os.X_OK):
            raise Unavailable(f"{wanted} is no program")
        return wanted
    if found := shutil.which(f"python{wanted}"):
        return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    number, threads = wanted.removesuffix("t"), "t" if wanted.endswith("t") else ""
    of_pyenv = sorted(root.glob(f"{number}.*{threads}/bin/python"), key=_patch)
    of_pyenv = [path for path in of_pyenv if path.parts[-3].endswith("t") == bool(threads)]
    if not of_pyenv:
        raise Unavailable(f"no python{wanted} on PATH, and none in {root}")
    return str(of_pyenv[-1])


def _patch(interpreter: Path) -> list[int]:
    parts = interpreter.parts[-3].removesuffix("t").split(".")
    return [int(part) for part in parts if part.isdecimal()]


def make_environment(interpreter: str, folder: Path, torch: str) -> Path:
    """Install into the folder what is missing there; return its python.

    Raises `Unavailable` with pip's reason.
    """
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
    wanted = ["-c", str(pins), f"torch=={torch}", "-e", f"{ROOT}[dev]", "-e", f"{ROOT}/lab"]
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
    """The versions of Python and torch; both are empty if torch or foreprop cannot be imported."""
    code = "import platform, torch, foreprop; print(platform.python_version(), torch.__version__)"
    printed = subprocess.run(
        [str(python), "-c", code], stdout=subprocess.PIPE, text=True, check=False
    ).stdout.split()
    return (printed[0], printed[1]) if len(printed) == 2 else ("", "")


def reason_of(output: str) -> str:
    """pip's last error, which names what it could not find."""
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if "ERROR: " in line]
    return errors[-1] if errors else output.strip().rpartition("\n")[2]


def run_tests(python: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all tests passed, and pytest's last line."""
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


def try_pair(wanted: str, torch: str) -> Outcome:
    folder = RUNS / f"{wanted.strip('/').replace('/', '-')}-torch-{torch}"
    try:
        python = make_environment(find_interpreter(wanted), folder, torch)
    except Unavailable as missing:
        return Outcome(wanted, torch, str(missing))
    own, torch_version = versions_of(python)
    if not torch_version:
        return Outcome(wanted, torch, "torch or foreprop cannot be imported", passed=False)
    results = [run_tests(python, tests) for tests in (UNIT, PROCESSES)]
    message = "; ".join(line for _, line in results)
    return Outcome(own, torch_version, message, passed=all(passed for passed, _ in results))


def table(outcomes: Sequence[Outcome]) -> str:
    """The Markdown table that docs/versions.md has."""
    words = {True: "passed", False: "FAILED", None: "not run"}
    rows = [f"| {o.python} | {o.torch} | {words[o.passed]}: {o.message} |" for o in outcomes]
    return "\n".join(["| Python | torch | result |", "|---|---|---|", *rows])


def pinned_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if some tests were run and all of them passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", help="a version, or a path; repeat it")
    parser.add_argument("--torch", action="append", help="a version, as 2.13.0; repeat it")
    options = parser.parse_args(arguments)
    outcomes = [
        try_pair(python, torch)
        for torch in options.torch or [pinned_torch()]
        for python in options.python or PYTHONS
    ]
    print(table(outcomes))
    ran = [outcome.passed for outcome in outcomes if outcome.passed is not None]
    return 0 if ran and all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())

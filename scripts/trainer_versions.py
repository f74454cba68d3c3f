"""Run trainers' tests with other releases of Lightning, transformers and accelerate.

python scripts/trainer_versions.py                       the older ones of docs/trainers.md
python scripts/trainer_versions.py lightning==2.5.6      these, in one environment
python scripts/trainer_versions.py --only clip lightning==2.5.6     with pytest's -k

Each gets an environment in runs/versions that shares all other packages with this one, so that
torch is not downloaded again. Packages are installed without their dependencies: name each one that
has to be older, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from versions import RUNS, Unavailable, run_tests

OLDER = (
    ("lightning==2.5.6",),
    *(
        tuple(words.split())
        for words in (
            "transformers==5.10.4 accelerate==1.12.0 huggingface_hub==1.33.0 tokenizers==0.22.2",
            "transformers==4.57.6 accelerate==1.10.1 huggingface_hub==0.36.2 tokenizers==0.22.2"
            " datasets==4.0.0",
        )
    ),
)
LIGHTNING = ("tests/unit/integrations/test_lightning.py", "tests/process/test_lightning.py")
HUGGINGFACE = (
    "tests/unit/integrations/test_huggingface_ways_in.py",
    "tests/process/test_huggingface.py",
)


def make_environment(packages: Sequence[str], folder: Path) -> Path:
    """Install the packages into a new environment; return its python.

    Raises `Unavailable` with pip's reason.
    """
    venv.create(folder, with_pip=False, symlinks=True, clear=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = folder / "lib" / version / "site-packages"
    (own / "beside.pth").write_text(f"import site; site.addsitedir({_everything_else()!r})\n")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(own)]
    made = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if made.returncode:
        raise Unavailable(made.stderr.strip().rpartition("\n")[2])
    return python


def _everything_else() -> str:
    return sysconfig.get_path("purelib")


def tests_of(packages: Sequence[str]) -> tuple[str, ...]:
    return LIGHTNING if packages[0].startswith("lightning") else HUGGINGFACE


def try_packages(packages: Sequence[str], only: str) -> tuple[bool, str]:
    """Whether all tests passed, and a line about them."""
    folder = RUNS / "-".join(packages[0].split("=="))
    try:
        python = make_environment(packages, folder)
    except Unavailable as missing:
        return False, str(missing)
    return run_tests(python, [*tests_of(packages), *(["-k", only] if only else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all tests passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", help="name==version; default: the older ones")
    parser.add_argument("--only", default="", help="tests by name, as pytest's -k")
    options = parser.parse_args(arguments)
    outcomes = {
        " ".join(packages): try_packages(packages, options.only)
        for packages in ([options.packages] if options.packages else OLDER)
    }
    for packages, (passed, message) in outcomes.items():
        print(f"{packages}: {'passed' if passed else 'FAILED'}: {message}")
    return 0 if all(passed for passed, _ in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

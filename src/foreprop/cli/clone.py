"""Commands whose code is no part of the package: it lies beside it, in a clone of the repository.

What the papers' experiments and our own benchmarks need is found where foreprop is installed
from a clone (``pip install -e``), and loaded when it is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from foreprop.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
"""Where the package lies in ``src``; of an installed wheel this is some folder of Python's."""


class NotInstalled(ConfigError):
    """What a command needs is not there; nothing was typed wrongly."""


def load(source: str, what: str) -> Any:
    """``what`` needs it. Raises `NotInstalled` if the source, or what that needs, is not there."""
    module, _, name = source.partition(":")
    if not (REPOSITORY / module.partition(".")[0] / "__init__.py").is_file():
        raise NotInstalled(
            f"{what} needs a clone of foreprop's repository, and this is an installed package: in a"
            " clone, run pip install -e '.[lab]', then the same command again"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise missing_extra(what, error) from error


def missing_extra(what: str, error: ModuleNotFoundError) -> NotInstalled:
    """For what needs a library that only an extra installs."""
    return NotInstalled(
        f"{what} needs {error.name}, which is not installed: pip install 'foreprop[lab]'"
    )

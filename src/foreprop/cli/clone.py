"""Commands whose code is no part of the package: it lies beside it, in a clone of the repository.

What the papers' experiments and our own benchmarks need is found where foreprop is installed
from a clone (``pip install -e``), or in the working directory, and loaded when it is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from foreprop.errors import ConfigError, how_to_install

REPOSITORY = Path(__file__).resolve().parents[3]
"""Where the package lies in ``src``; of an installed wheel this is some folder of Python's."""


class NotInstalled(ConfigError):
    """What a command needs is not there; nothing was typed wrongly."""


def load(source: str, what: str) -> Any:
    """``what`` needs it. Raises `NotInstalled` if the source, or what that needs, is not there."""
    module, _, name = source.partition(":")
    repository = _repository_of(module.partition(".")[0])
    if repository is None:
        raise NotInstalled(
            f"{what} needs a clone of foreprop's repository, and this is an installed package: in a"
            " clone, run pip install '.[lab]', then the same command again, there"
        )
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise missing_extra(what, error) from error


def _repository_of(package: str) -> Path | None:
    """The clone that foreprop was installed from, if that is seen, or the one that we are in."""
    here = Path.cwd()
    clones = [REPOSITORY, *[here] * (here / "src" / "foreprop" / "version.py").is_file()]
    return next((clone for clone in clones if (clone / package / "__init__.py").is_file()), None)


_EXTRAS = {"jinja2": "report", "pooch": "demo", "tensorboard": "tensorboard", "wandb": "wandb"}


def missing_extra(what: str, error: ModuleNotFoundError) -> NotInstalled:
    """For what needs a library that only an extra installs."""
    return NotInstalled(
        f"{what} needs {error.name}, which is not installed:"
        f" {how_to_install(_EXTRAS.get(error.name or '', 'lab'))}"
    )

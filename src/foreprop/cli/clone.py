"""Commands whose code is no part of the package: it lies beside it, in a clone of the repository.

What the papers' experiments and our own benchmarks need is found where foreprop is installed
from a clone (``pip install -e``), and loaded when it is called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from foreprop.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
"""Where the package lies in ``src``; of an installed wheel this is some folder of Python's."""

_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def add_from_clone(group: typer.Typer, name: str, source: str, summary: str) -> None:
    """Let ``group`` have a command; ``source`` is ``module:name`` of a `typer.Typer`."""

    @group.command(name, help=summary, add_help_option=False, context_settings=_PASSED_ON)
    def forward(context: typer.Context) -> None:
        app: typer.Typer = load(source, f"`{context.command_path}`")
        typer.main.get_command(app)(context.args, prog_name=context.command_path)


def load(source: str, what: str) -> Any:
    """``what`` needs it. Raises `ConfigError` if the source, or what that needs, is not there."""
    module, _, name = source.partition(":")
    if not (REPOSITORY / module.partition(".")[0] / "__init__.py").is_file():
        raise ConfigError(
            f"{what} needs a clone of foreprop's repository, and this is an installed package: in a"
            " clone, run pip install -e '.[lab]', then the same command again"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise missing_extra(what, error) from error


def missing_extra(what: str, error: ModuleNotFoundError) -> ConfigError:
    """For what needs a library that only an extra installs."""
    return ConfigError(
        f"{what} needs {error.name}, which is not installed: pip install 'foreprop[lab]'"
    )

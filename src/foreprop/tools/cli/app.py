"""The command line as a whole: versions, completion, errors and exit codes.

Exit codes: 0 for success, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import logging
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from foreprop import errors
from foreprop.errors import ConfigError, ForepropError, HandshakeError
from foreprop.tools.cli.registry import LazyGroup, NotInstalled
from foreprop.version import __version__

WRONG_USAGE, FAILED = 2, 1
_ELASTIC = "torch.distributed.elastic"


class CommandLine(LazyGroup):
    """All commands; every error is one line."""

    def main(self, args: Any = None, *, standalone_mode: bool = True, **others: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **others)
        sys.exit(self._code(args, **others))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        # Otherwise torch logs what `_launcher_code` reports: a failed worker, or Ctrl-C.
        for name, logger in logging.root.manager.loggerDict.items():
            ours = name.startswith((_ELASTIC, "torch.multiprocessing"))
            if ours and isinstance(logger, logging.Logger):  # each has a level of its own
                logger.setLevel(logging.CRITICAL)
        return found

    def _code(self, args: Any, **others: Any) -> int:
        try:
            return int(super().main(args, standalone_mode=False, **others) or 0)
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            path = "foreprop" if context is None else context.command_path
            return _fail(f"{_usage_error(error)}; see {path} -h", error.exit_code)
        except typer.Abort:
            return FAILED
        except (HandshakeError, NotInstalled) as error:
            return _fail(str(error))
        except ConfigError as error:
            return _fail(str(error), WRONG_USAGE)
        except ForepropError as error:
            return _fail(str(error))
        except Exception as error:
            return _launcher_code(error)


def _usage_error(error: typer.TyperException) -> str:
    hint = getattr(error, "param_hint", None)
    if isinstance(hint, str) and error.message:
        message = error.message.rstrip(".")
        return f"{hint} is {message}" if "; " in message else f"{hint}: {message}"
    return error.format_message().rstrip(".")


def _launcher_code(error: Any) -> int:
    """The exit code for what torch raises while it watches over workers; raises anything else."""
    if not type(error).__module__.startswith(_ELASTIC):
        raise error
    if type(error).__name__ == "SignalException":  # Ctrl-C
        return 128 + int(error.sigval)
    if type(error).__name__ == "ChildFailedError":
        return _fail(describe_failed_worker(error))
    raise error


def _fail(message: str, code: int = FAILED) -> int:
    typer.echo(f"foreprop: {message}", err=True)
    return code


def describe_failed_worker(error: Any) -> str:
    """Which worker failed first, and of what; with its traceback if that is a defect."""
    rank, failure = error.get_first_failure()
    message: Any = failure.message  # what torch's `record` wrote, or a text
    if isinstance(message, str):  # a signal killed it before it could say anything
        return f"worker {rank} died: {message}"
    cause, stack = message["message"], message.get("extraInfo", {}).get("py_callstack", "")
    on_purpose = hasattr(errors, cause.partition(":")[0]) or cause.startswith("DatasetUnavailable")
    text = f"worker {rank} failed: {cause}"
    return text if on_purpose else f"{text}\n{stack}"


app = typer.Typer(
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def versions() -> str:
    """The versions of foreprop and of what it stands on, with nothing of it imported."""
    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"foreprop {__version__} (torch {torch}, Python {platform.python_version()})"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of foreprop, torch and Python, and exit.",
        ),
    ] = False,
) -> None:
    """P3, priority-based parameter propagation, for PyTorch."""

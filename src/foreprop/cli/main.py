"""The command line: ``foreprop --help``."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from foreprop import errors
from foreprop.cli.clone import add_from_clone
from foreprop.cli.config import config
from foreprop.cli.demo import demo
from foreprop.cli.doctor import doctor
from foreprop.cli.lab import lab
from foreprop.cli.plan import plan
from foreprop.cli.run import run
from foreprop.cli.server import server
from foreprop.cli.trace import trace
from foreprop.errors import ForepropError
from foreprop.version import __version__

app = typer.Typer(
    help="P3, priority-based parameter propagation, for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("doctor")(doctor)
app.command("server")(server)
app.command("plan")(plan)
app.add_typer(lab, name="lab")
add_from_clone(app, "bench", "benchmarks.command:bench", "Measure foreprop itself.")
app.command("config")(config)
app.command("trace")(trace)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """P3, priority-based parameter propagation, for PyTorch."""


def main() -> None:
    """The console script: what went wrong is a message and an exit code, not a traceback."""
    _quiet_launcher()
    try:
        app()
    except ForepropError as error:
        _fail(str(error))
    except ChildFailedError as error:
        _fail(describe_failed_worker(error))
    except SignalException as error:  # Ctrl-C while torch watches over workers
        sys.exit(128 + error.sigval)


def _quiet_launcher() -> None:
    """torch would log the traceback of a worker that failed, or that Ctrl-C came; so do we."""
    for name, logger in logging.root.manager.loggerDict.items():
        ours = name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
        if ours and isinstance(logger, logging.Logger):  # each has a level of its own
            logger.setLevel(logging.CRITICAL)


def describe_failed_worker(error: ChildFailedError) -> str:
    """Which worker failed first, and of what; with its traceback if that is a defect."""
    rank, failure = error.get_first_failure()
    told: Any = failure.message  # what torch's `record` wrote, or a text
    if isinstance(told, str):  # it died without a word, of a signal
        return f"worker {rank} died: {told}"
    cause, stack = told["message"], told.get("extraInfo", {}).get("py_callstack", "")
    on_purpose = hasattr(errors, cause.partition(":")[0]) or cause.startswith("DatasetUnavailable")
    text = f"worker {rank} failed: {cause}"
    return text if on_purpose else f"{text}\n{stack}"


def _fail(message: str) -> None:
    typer.echo(f"foreprop: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()

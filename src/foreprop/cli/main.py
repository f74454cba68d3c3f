"""The command line, ``foreprop --help``, and its small commands: demo, config and trace."""

from __future__ import annotations

import logging
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from foreprop import errors
from foreprop.cli.clone import add_from_clone
from foreprop.cli.compare import compare
from foreprop.cli.doctor import doctor
from foreprop.cli.lab import lab
from foreprop.cli.options import Shown, filling, mbit, presets_from
from foreprop.cli.plan import plan
from foreprop.cli.run import run, server
from foreprop.config import Config, did_you_mean, parse_setting
from foreprop.demo.run import run_demo
from foreprop.demo.training import DemoSetting
from foreprop.errors import ConfigError, ForepropError
from foreprop.observe.trace import merge_traces
from foreprop.version import __version__


@filling(
    DemoSetting,
    rate_bits_per_s=mbit(),
    presets=Shown(kind=str, default="kvstore,p3", read=presets_from),
)
def demo(
    *,
    report: Annotated[
        Path, typer.Option(help="HTML report to write; traces go into folders beside it.")
    ] = Path("runs/demo/report.html"),
    **given: Any,
) -> None:
    """Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.

    Workers and servers are real processes on this machine; each node is a network namespace whose
    link the kernel shapes. Where it makes no namespaces, sockets are paced and DDP is left out.
    Shows ms per step, samples per second, the share of time spent waiting for parameters,
    accuracy, and the final weights' SHA-256, which is the same for all presets.
    """
    setting = DemoSetting(folder=str(report.parent), **given)
    command = " ".join(["foreprop", *sys.argv[1:]])
    run_demo(setting, report, command=command, console=Console())


def trace(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder given as trace=...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="DIRECTORY/merged.json")
    ] = None,
) -> None:
    """Lay the traces of one run's workers and servers into one file for Perfetto.

    Times are microseconds since 1970 by each machine's clock: exact on one machine, across machines
    as good as their clocks agree.
    """
    target = out or directory / "merged.json"
    if not any(directory.glob("*.trace.json")):
        raise ConfigError(
            f"{directory} has no *.trace.json: a process writes its own when its session closes,"
            " if parallelize() had trace=FOLDER or FOREPROP_TRACE was set"
        )
    try:
        count = merge_traces(directory, target)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a trace in {directory} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    typer.echo(f"{count} events in {target}; open it in https://ui.perfetto.dev")


def config(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Settings, as parallelize() takes them."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="p3 (default), slicing, kvstore, wfbp or tensorflow.")
    ] = None,
) -> None:
    """Show every setting: its value, where the value came from, and its meaning with its unit.

    A NAME=VALUE here beats the environment (FOREPROP_ and the name in capitals), which beats the
    preset, which beats the default. A script's parallelize() sees the same environment.
    """
    chosen, sources = Config.resolve_with_sources(preset, **settings_from(settings or []))
    Console().print(settings_table(chosen, sources))


def settings_from(texts: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as arguments of `Config`; raises `ConfigError`."""
    hints = typing.get_type_hints(Config)
    names = [spec.name for spec in fields(Config)]
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not a setting; write it as NAME=VALUE")
        if name not in names:
            advice = did_you_mean(name, names)
            raise ConfigError(
                f"no setting is called {name!r}; there are {', '.join(names)}{advice}"
            )
        found[name] = parse_setting(name, value, hints[name])
    return found


_UNITS = {"_bits_per_s": "bit/s", "_bytes": "bytes", "_elems": "elements", "_s": "s"}
"""By the end of a setting's name; the first that fits."""


def value_text(name: str, value: Any) -> str:
    """A setting's value with its unit."""
    if value is None:
        return "not set"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return f"{number} {unit}".strip()


def settings_table(chosen: Config, sources: dict[str, str]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("setting", "value", "from"):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("meaning", ratio=1)
    for spec in fields(chosen):
        text = value_text(spec.name, getattr(chosen, spec.name))
        shown.add_row(spec.name, text, sources[spec.name], spec.metadata["help"])
    return shown


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("compare", context_settings={"allow_interspersed_args": False})(compare)
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

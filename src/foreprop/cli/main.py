"""The command line: ``foreprop --help``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foreprop.cli.bench import bench
from foreprop.cli.demo import demo
from foreprop.errors import ForepropError
from foreprop.version import __version__

app = typer.Typer(
    help="P3, priority-based parameter propagation, for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands."""


def main() -> None:
    """The console script: a `ForepropError` is a message, not a traceback."""
    try:
        app()
    except ForepropError as error:
        typer.echo(f"foreprop: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""A command's options, made from the fields of the dataclass that they fill.

Name, type, default and help are the field's (`foreprop.quantities.option`); `Shown` says
where the command line has another form, as 10Gbit for 1e10.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from foreprop.errors import ConfigError

Command = Callable[..., None]
_THE_FIELDS: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How an option is shown, where that differs from what its field says."""

    name: str | None = None
    kind: Any = None
    """The type of what is typed."""
    default: Any = _THE_FIELDS
    help: str | None = None
    metavar: str | None = None
    declared: tuple[str, ...] = ()
    """The option's own spelling, if it does not follow from its name."""
    show_default: bool = True
    read: Callable[[Any], Any] = lambda value: value
    """Converts what is typed to the field's value; None stays None."""

    @property
    def reads_text(self) -> bool:
        return self.kind in (str, str | None)

    def parameter(self, of: Field[Any], kind: Any) -> inspect.Parameter:
        name = self.name or of.name
        default = of.default if self.default is _THE_FIELDS else self.default
        declared = self.declared
        if kind is bool and not declared:
            declared = (f"--{name.replace('_', '-')}",)  # no --no-...
        limits = {} if self.reads_text else of.metadata
        typed = typer.Option(
            *declared,
            help=self.help or of.metadata["help"],
            min=limits.get("min"),
            max=limits.get("max"),
            metavar=self.metavar,
            show_default=self.show_default,
        )
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[self.kind or kind, typed],
        )


def filling(
    setting: type, omit: Collection[str] = (), /, **shown: Shown
) -> Callable[[Command], Command]:
    """Give a command options for a dataclass's fields, but for ``omit``.

    They stand between the command's own parameters and those of these that are keyword-only. The
    command gets the values by the fields' names.
    """
    hints = get_type_hints(setting)
    chosen = [
        spec
        for spec in fields(setting)
        if spec.name not in omit and (spec.name in shown or "help" in spec.metadata)
    ]
    forms = {spec.name: shown.get(spec.name, Shown()) for spec in chosen}

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        first = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        derived = [forms[spec.name].parameter(spec, hints[spec.name]) for spec in chosen]
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*first, *derived, *own[len(first) :])
        ]

        def filled(**given: Any) -> None:
            for name, form in forms.items():
                value = given.pop(form.name or name)
                given[name] = None if value is None else form.read(value)
            command(**given)

        filled.option_of = {  # type: ignore[attr-defined]
            name: form.name for name, form in forms.items() if form.name is not None
        }
        filled.__name__, filled.__doc__ = command.__name__, command.__doc__
        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        filled.__annotations__ = {p.name: p.annotation for p in parameters}
        return filled

    return decorate


def names_in(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def systems(known: Collection[str], *, default: str, more: str = "") -> Shown:
    return Shown(
        kind=str,
        default=default,
        read=names_in,
        help=f"Separated by commas: {', '.join(known)}{more}.",
    )


def writable(folder: Path) -> Path:
    """Check, before the work begins, that its outcome can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"out is {folder}, which cannot be written: {error.strerror}") from error
    return folder

"""How every command of foreprop's reads its options, shows its help and words its errors.

Options have one vocabulary: the names of an older foreprop and of other tools are accepted where a
command has the option under our name. Numbers must be finite. An error about a field of a
configuration names the option that was typed for it. A help is drawn in frames, or as plain text
where those would cut a word.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from foreprop.errors import ConfigError

PANELS = {
    "Cluster": "nodes workers_per_node rate balance latency servers server_rate link_rates"
    " cross_traffic egress_only resources port master_addr interface rendezvous count",
    "Model and compute": "model profile scale compute batch batch_size slice_elems width hidden"
    " dense_gradients preset part task epochs momentum params",
    "What is compared": "systems presets steps rounds warm_up seed trace mxnet_python ablation"
    " torchft_python quick kind only what_if_range names seeds",
    "Uneven nodes and steps": "slow_nodes slowdown jitter step_jitter step_lengths staleness",
    "Simulation": "symmetric representatives compression rows dedicated_servers server_s_per_gb",
    "On every host": "env python directory ssh grace module backend find_unused_parameters",
    "Output": "out as_json dry_run verbose",
}
"""Where a help shows an option, by its name."""
_TYPED = "foreprop.typed"
"""A key of a context's meta: by our name of an option, the other one that was typed."""
_CUT = "\N{HORIZONTAL ELLIPSIS}"
"""What rich leaves of a word that does not fit."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Renamed:
    """What an option is called now; ``unit`` is written after its value."""

    now: str
    unit: str = ""
    lasting: bool = False
    """The name that other tools have: it stays, and is no reason for a notice."""


OTHER_NAMES = {
    "--rate-mbit": Renamed("--rate", "Mbit"),
    "--compute-s": Renamed("--compute", "s"),
    "--iterations": Renamed("--steps"),
    "--rounds": Renamed("--steps"),
    "--workers": Renamed("--nodes"),
    "--report": Renamed("--out"),
    "--batch-size": Renamed("--batch", lasting=True),
    "--hostfile": Renamed("--resources", lasting=True),
    "--nnodes": Renamed("--nodes", lasting=True),
    "--nproc-per-node": Renamed("--workers-per-node", lasting=True),
}
"""Accepted where a command has the option of today, and none of this name."""


class CheckedCommand(TyperCommand):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        for parameter in self.params:
            is_unplaced = getattr(parameter, "rich_help_panel", "") is None
            if is_unplaced and not _is_argument(parameter):
                parameter.rich_help_panel = _PANEL_OF.get(parameter.name or "")  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed: dict[str, str] = {}
        ctx.meta[_TYPED] = typed
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in parameter.opts
        }
        words = with_current_names(args, takes_value, typed, ctx.allow_interspersed_args)
        try:
            rest = super().parse_args(ctx, list(words))
        except typer.BadParameter as error:
            if error.param is not None and error.message:
                _word_typers_error(error, args, typed)
            raise
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                message = f"{value}; it must be a finite number"
                raise typer.BadParameter(message, ctx, param_hint=parameter.opts[-1])
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            error.args = (self._with_options(str(error), ctx),)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; arguments stand in capitals, as their metavars do."""
        pieces = [self.options_metavar or ""]
        for argument in filter(_is_argument, self.get_params(ctx)):
            name = (argument.name or "").upper() + ("..." if argument.nargs != 1 else "")
            pieces.append(argument.metavar or (name if argument.required else f"[{name}]"))
        return pieces

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Draw frames, or where those would cut a word (narrow terminals), plain text."""
        framed, plain = copy.copy(self), copy.copy(self)
        framed.help = escape(unwrapped(self.help or ""))
        plain.help, plain.rich_markup_mode = unwrapped(self.help or "", keep="\b\n"), None
        draw = super(CheckedCommand, framed).format_help
        if is_cut(lambda: draw(ctx, formatter)):
            super(CheckedCommand, plain).format_help(ctx, formatter)
        else:
            draw(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if _is_argument(parameter) else "Options"
            panel = getattr(parameter, "rich_help_panel", None) or usual
            if (record := parameter.get_help_record(ctx)) is not None:
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def _with_options(self, text: str, ctx: Any) -> str:
        """An error's ``text`` with options' names in place of fields' and parameters'."""
        options = {p.name: p for p in self.params if p.name and p.opts[-1].startswith("--")}
        fields = getattr(self.callback, "option_of", {})
        ours = {f"{name}_s": name for name in options}
        ours |= {p.opts[-1][2:].replace("-", "_"): name for name, p in options.items()}
        for field, name in {**{name: name for name in options}, **ours, **fields}.items():
            if name in options:
                flag, typed = options[name].opts[-1], ctx.params.get(name)
                flag = ctx.meta[_TYPED].get(flag, flag)
                text = with_flag(text, field, flag, typed)
        return text


def is_cut(draw: Callable[[], None]) -> bool:
    """Whether what rich draws in its frames loses the end of a word, as on narrow terminals."""
    with contextlib.redirect_stdout(io.StringIO()) as drawn:
        draw()
    return _CUT in drawn.getvalue()


def with_flag(text: str, field: str, flag: str, typed: object) -> str:
    """An error's ``text`` with the option ``flag`` for ``field``, and its value as it was typed.

    A field whose name is a common word is replaced only where a sentence begins with it.
    """
    found = re.match(rf"{re.escape(field)} (is|has|names) ", text)
    if found is not None:
        number = isinstance(typed, int | float)
        if number and found[1] == "is" and not text.startswith(f"{field} is {typed}"):
            return text  # another number was not typed here: it is of --what-if, for example
        text = f"{flag} {text[len(field) + 1 :]}"
        if isinstance(typed, str) and found[1] == "is":
            text = re.sub(rf"^{flag} is [^\s;'\"]+;", lambda _: f"{flag} is {typed!r};", text)
    if "_" in field:
        return re.sub(rf"(?<![\w.'-]){re.escape(field)}(?![\w'])", flag, text)
    return re.sub(rf"^(|[\w-]+ and ){field}(?= and | are )", rf"\1{flag}", text)


def _word_typers_error(
    error: typer.BadParameter, args: Sequence[str], typed_as: Mapping[str, str]
) -> None:
    """Make ``--steps is '3'; it must be ...`` of typer's ``Input should be ...``."""
    name = error.param.opts[-1] if error.param is not None else ""
    name = typed_as.get(name, name)
    error.message = error.message.replace("Input should be", "it must be")
    error.message = re.sub(r"^Value error, .* is not one of ", "it must be one of ", error.message)
    error.param_hint = name
    for place, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if option == name and (equals or place + 1 < len(args)):
            error.message = f"{value if equals else args[place + 1]!r}; {error.message}"


def with_current_names(
    args: Iterable[str],
    takes_value: Mapping[str, bool],
    typed_as: dict[str, str],
    interspersed: bool = True,
) -> Iterator[str]:
    """The words ``args``, with an older foreprop's and other tools' options under our names.

    ``takes_value`` says of each of the command's options whether a value follows; ``typed_as`` is
    filled with what was typed, by our name. Without ``interspersed``, what follows the first
    argument belongs to a script and stays as it is.
    """
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        other = OTHER_NAMES.get(name)
        is_other = other is not None and name not in takes_value and other.now in takes_value
        needs_value = is_other or takes_value.get(name, False)
        if needs_value and not equals and (following := next(rest, None)) is not None:
            value, equals = following, " "
        if other is not None and is_other:
            typed_as[other.now] = name
            if re.fullmatch(r"[\d.]+", value):
                value += other.unit
            if not other.lasting:
                now = f"{name} is now {other.now} {value}; the old name goes with the next version"
                typer.echo(f"foreprop: {now}", err=True)
            yield from filter(None, (other.now, value))
        else:
            yield from (name, value) if equals == " " else (arg,)
        if arg == "--" or not (interspersed or arg.startswith("-")):
            yield from rest


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def unwrapped(text: str, keep: str = "") -> str:
    """Paragraphs as one line each, for the terminal to wrap; indented lines, as examples', stay.

    ``keep`` is put before a paragraph whose lines stay.
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(keep + p if "\n  " in p else " ".join(p.split("\n")) for p in paragraphs)

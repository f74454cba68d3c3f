"""What `Config` says of itself: its docstring, and what a wrong name may have meant."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreprop.config.settings import Config


def with_advice(cls: type[Config], make: Callable[..., None]) -> Callable[..., None]:
    """Have Python's own error about an unknown argument name the setting that is close to it."""

    @functools.wraps(make)
    def __init__(self: Config, *values: Any, **settings: Any) -> None:
        try:
            make(self, *values, **settings)
        except TypeError as error:
            from foreprop.config.checks import with_advice

            raise with_advice(error, settings, [spec.name for spec in fields(cls)]) from None

    return __init__


def described(cls: type[Config]) -> str:
    """The docstring, with what each setting means."""
    meanings = (
        textwrap.fill(
            f"{spec.name}: {spec.metadata['help']}",
            width=92,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
        )
        for spec in fields(cls)
    )
    return f"{inspect.cleandoc(cls.__doc__ or '')}\n\nSettings:\n" + "\n".join(meanings) + "\n"

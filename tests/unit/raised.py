"""An error's text, to be compared, so that a failure shows which case it is."""

from __future__ import annotations

from collections.abc import Callable


def error_of(
    kind: type[Exception], call: Callable[..., object], *given: object, **named: object
) -> str:
    """The text of the error that a call raises; fails if it raises none."""
    try:
        found = call(*given, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} for {given} {named}, but {found!r}")

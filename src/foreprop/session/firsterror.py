"""The error that ended a loop stays the one that is seen, whatever fails after it."""

from __future__ import annotations

import sys

from foreprop.errors import ForepropError


def error_under_way(before: BaseException | None) -> BaseException | None:
    """What is being handled, as in a ``finally`` that an error leads through.

    ``before``: what was being handled when the session began, which is not its loop's.
    """
    found = sys.exception()
    return None if found is before else found


def put_behind(first: BaseException, second: ForepropError) -> None:
    """Tell the second beside the first, instead of raising it."""
    if second is first or second in _causes_of(first):
        return
    text = f"closing the foreprop session failed, too: {type(second).__name__}: {second}"
    first.add_note(text)
    print(f"foreprop: {text}", file=sys.stderr, flush=True)


def _causes_of(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found

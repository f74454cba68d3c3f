"""An error at a session's end, after the one that ended its loop."""

from __future__ import annotations

from foreprop.config import LOGGER
from foreprop.errors import ForepropError


def put_behind(first: BaseException, second: ForepropError) -> None:
    """Tell the second beside the first, instead of raising it."""
    if second is first or second in _causes_of(first):
        return
    text = f"closing the foreprop session failed, too: {type(second).__name__}: {second}"
    first.add_note(text)
    LOGGER.error("%s", text)


def _causes_of(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found

"""The console script ``foreprop``: Ctrl-C is silent from its first line on.

It imports nothing until `main` watches over what it imports. The commands are the table of
`foreprop.cli.registry`.
"""

from __future__ import annotations

import sys
from typing import Any

_INTERRUPTED = 130


def main() -> None:
    """What went wrong is a message and an exit code, not a traceback."""
    try:
        _at_the_end_die_silently()
        from foreprop.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _at_the_end_die_silently() -> None:
    """Python would show where Ctrl-C met it while it shuts down."""
    import atexit
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> Any:
    """``app``, for who runs commands in its own process."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foreprop.cli.app import app

    return app


if __name__ == "__main__":
    main()

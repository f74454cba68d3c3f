"""The console script ``foreprop``: Ctrl-C is silent from its first line on.

Nothing is imported before `main` can catch Ctrl-C. The commands are the table of
`foreprop.tools.cli.registry`.
"""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; what goes wrong is a message and an exit code, not a traceback."""
    try:
        import atexit
        import signal

        # Otherwise Python prints a traceback if Ctrl-C comes while it shuts down.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
        from foreprop.tools.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

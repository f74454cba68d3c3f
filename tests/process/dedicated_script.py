"""The command ``foreprop server``, whose servers are forked: ``--count`` of them."""

from __future__ import annotations

import sys

from foreprop.tools.cli.main import main
from tests.process.forked import end_process, fork_servers

if __name__ == "__main__":
    fork_servers(int(sys.argv[sys.argv.index("--count") + 1]))
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    end_process(int(bool(code)))

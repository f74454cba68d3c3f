"""`tests.process.train_script`, whose process does not take apart what it shares with others.

It is forked, and to do so would take longer than the training.
"""

from __future__ import annotations

import os
import sys

from tests.process.forked import end_process, fork_servers
from tests.process.train_script import main

if __name__ == "__main__":
    fork_servers(int(os.environ.get("FORK_SERVERS", "0")))
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which is how some of the others are told
    end_process(code)

"""A rank that trains with several combinations of settings, one after the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.matrix import by_hand, check_trained, together, train_rank
from tests.process.forked import fork_servers

if __name__ == "__main__":
    fork_servers(int(os.environ.pop("FORK_SERVERS", "0")))
    rank, done = os.environ["RANK"], []
    for names in json.loads(os.environ["CASES"]):
        settings = together(*names)
        assert settings is not None
        found = train_rank(settings, os.environ["SECRET"], None)
        assert found is not None
        check_trained(names, found, by_hand(settings))
        done.append(names)
    (Path(os.environ["RESULTS"]) / f"rank-{rank}.json").write_text(json.dumps({"done": done}))

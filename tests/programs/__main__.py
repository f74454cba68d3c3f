"""``python -m tests.programs``: run the programs, compare, write the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.programs import catalogue, examine, table


def main() -> int:
    """Exit code 1 if a program that ran on DDP did not go through, or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="parts of their names; by default all")
    parser.add_argument("--worlds", default="2,3", help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, interleaved")
    parser.add_argument("--folder", type=Path, default=Path("runs/programs"), help="for the runs")
    parser.add_argument("--table", type=Path, help="put the table of all results in --folder there")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    worlds = [int(world) for world in arguments.worlds.split(",")]
    programs = catalogue.chosen(arguments.programs)
    if arguments.programs and not programs:
        parser.error(f"no program is called {' or '.join(arguments.programs)}")
    examination = examine.Examination(arguments.folder.absolute(), arguments.repeats)
    for program in [] if arguments.only_table else programs:
        for world in worlds:
            examination.run(program, world)
    if arguments.table:
        table.write(arguments.table, examination.earlier(), worlds)
    return 1 if examination.failed else 0


if __name__ == "__main__":
    sys.exit(main())

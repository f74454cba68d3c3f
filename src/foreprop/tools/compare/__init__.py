"""The user's own script on DDP and on foreprop: what ``foreprop compare`` runs.

`run` starts the script afresh for every system and round, with `foreprop.tools.run`'s launcher. In
each process `rank` puts `standin` in the place of `foreprop.parallelize`; `ddp` is what that gives
the script for DistributedDataParallel. `recorder` measures, `records` brings it here, `result` and
`losses` say what it means.
"""

"""One command, many machines: what ``foreprop run`` runs.

`resources` says which hosts there are, `plan` what each is to run, `run` starts and ends it all
from here. On each host `host` watches over `agent`, which is torchrun with pipes for log files.
"""

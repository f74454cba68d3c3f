"""Compiled code (`torch.compile`) in which each parameter waits at its own first use.

Loaded when a session's thread enters compiled code for the first time. `tracing` sees every
graph that Dynamo makes, `graphs` puts the operators of `operators` into it, `inductor` the copies
that inductor would make before them, and `regions` runs it. lab/docs/compiled.md names the
files that touch what is private in torch.
"""

"""Compiled code (`torch.compile`) in which each parameter waits at its own first use.

Loaded when a session's thread enters compiled code for the first time. `tracing` is told of every
graph that Dynamo makes, `graphs` puts the operators of `operators` into it, and `regions` runs it.
What is private in torch is touched in `tracing` and in `regions` only.
"""

"""The pure core: slicing, placement, queue, wire format and the two state machines.

Nothing here opens a socket, starts a thread, reads a clock or the environment, or logs. State
changes only through ``machine.handle(event) -> list[Instruction]``, so that training, the tests
and a simulator run the very same scheduling code.
"""

"""Discrete-event simulation of the lab: the core's state machines on a simulated clock."""

"""The settings of a run of the lab or the simulator, and the records that are kept of it."""

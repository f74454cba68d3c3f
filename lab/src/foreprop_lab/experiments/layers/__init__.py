"""Real layers of torch on emulated accelerators, eager and compiled."""

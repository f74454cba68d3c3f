"""foreprop's lab: emulated clusters, simulator, demo, the papers' experiments and benchmarks."""

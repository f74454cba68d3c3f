"""``foreprop demo``: P3 beside its baseline on real data, on this machine."""

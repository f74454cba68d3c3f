"""Benchmarks of foreprop itself; ``foreprop bench --help`` lists them."""

"""The papers' experiments: what `foreprop lab` runs from a clone of the repository."""

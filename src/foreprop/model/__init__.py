"""How long a step takes, by arithmetic: as published, and refined (docs/model.md)."""

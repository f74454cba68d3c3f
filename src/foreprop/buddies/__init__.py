"""A node dies with its server, and the others go on: docs/buddies.md."""

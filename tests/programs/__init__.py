"""Training programs of other people, run with foreprop's lines and, beside them, with DDP."""

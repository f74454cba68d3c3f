"""A language model with large sparse tables: Parallax's kind of experiment."""

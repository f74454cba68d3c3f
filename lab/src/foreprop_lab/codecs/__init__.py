"""Codecs of papers that have failed the test of accuracy, or gain nothing (docs/compression.md).

They register themselves as a user's codecs do: by entry points, as docs/extending.md says.
"""

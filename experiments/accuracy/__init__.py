"""What codecs, DGC and workers apart do to the accuracy of three small models."""

"""What codecs, DGC and asynchronous workers do to the accuracy of three small models."""

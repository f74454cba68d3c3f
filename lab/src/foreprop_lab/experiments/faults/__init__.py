"""What an elastic training loses through faults, in the lab's cluster."""

"""What a training loses through faults: elastic servers beside torchft, in the lab's cluster."""

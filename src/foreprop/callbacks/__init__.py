"""What writes a session's metrics elsewhere: given to `Session.call_every`."""

"""What each node does, in terms of the protocol and of ports. No adapter is imported here."""

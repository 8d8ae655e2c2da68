"""What each node does, told in terms of the protocol and of ports. No adapter is imported here."""

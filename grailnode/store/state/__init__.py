"""A node's own state on disk: objects in envelopes, and a list of their names (docs/guide/operate.md)."""

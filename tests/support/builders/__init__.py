"""Small valid objects for tests and benches: records, chains, policies, batches, sandboxes."""

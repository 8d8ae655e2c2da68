"""What the verbs do. A verb's module here is imported when the verb runs; its options are declared in grailnode/cli."""

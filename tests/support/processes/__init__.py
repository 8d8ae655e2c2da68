"""Programs of `grailnode` as real processes, or in the process of the test, and the runs that they work on."""

"""The whole network on one machine, with a cheat in it."""

"""The whole network on one machine, with a cheat in it. Imports every room of grailnode but cli."""

"""The whole network on one machine, with a cheating miner in it. Imports every room of grailnode but cli."""

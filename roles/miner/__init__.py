"""A miner: rollouts for every window, committed before the deadline. Imports roles.policy and roles.node."""

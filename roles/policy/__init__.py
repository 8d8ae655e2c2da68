"""Following the chain and serving its weights: what miner and validator share. Imports roles.node."""

"""A validator: judges miners' rollouts, reveals its verdicts, keeps its ledger. Imports roles.policy and roles.node."""

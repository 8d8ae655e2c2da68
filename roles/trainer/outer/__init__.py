"""Sites that train one policy together, and the coordinator that closes their rounds (docs/spec/outer-round.md)."""

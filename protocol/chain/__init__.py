"""The chain of policy versions: manifests and heads, and the verifier that trusts them. Imports identity."""

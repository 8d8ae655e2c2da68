"""The chain of policy versions: manifests, heads, anchors, and their verifier. Imports identity."""

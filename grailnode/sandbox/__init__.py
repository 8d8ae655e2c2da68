"""Runs foreign Python where it can reach nothing (docs/spec/environments.md, docs/adr/0302-two-sandboxes.md)."""

from grailnode.sandbox.bubblewrap import BubblewrapSandbox

__all__ = ["BubblewrapSandbox"]

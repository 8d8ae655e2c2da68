"""Runs foreign Python in isolation (docs/spec/environments.md, docs/adr/0302-two-sandboxes.md). Imports protocol."""

from grailnode.sandbox.bubblewrap import BubblewrapSandbox

__all__ = ["BubblewrapSandbox"]

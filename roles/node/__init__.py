"""What every role has: identity, proven time, memory of participants, retries. Imports protocol and roles.ports."""

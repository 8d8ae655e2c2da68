"""What every role has: identity, proven time, alarms and backoff. Imports protocol and roles.ports."""

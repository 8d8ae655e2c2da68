"""Object stores: implementations of roles.ports.ObjectStore. Imports no other room of grailnode."""

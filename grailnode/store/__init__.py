"""Object stores: the adapters behind roles.ports.ObjectStore. Imports no other room of grailnode."""

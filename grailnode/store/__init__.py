"""Object stores: each implements roles.ports.ObjectStore; retries, limits, counts and faults are decorators around any."""

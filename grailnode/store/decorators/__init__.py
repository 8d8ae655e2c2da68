"""Stores around a store: caching, retries, limits, measurements, and routing by participant. Imports roles.ports."""

"""Stores and proxies that inject chosen faults, the scenarios that use them, and malformed patches."""

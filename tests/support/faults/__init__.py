"""Stores and proxies that inject chosen faults, and the scenarios that use them."""

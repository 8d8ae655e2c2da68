"""Stores and servers that fail in chosen ways."""

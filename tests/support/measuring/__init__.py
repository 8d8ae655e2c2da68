"""Meters of memory and stores."""

"""Simulations, adversaries, fault proxies and builders for tests/ and bench/. Imports neither."""

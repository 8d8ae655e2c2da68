"""Modules that vLLM's processes import, and how they come to import them."""

"""Whole networks in one process on a virtual clock, and the rules that must hold in each of them."""

"""Tests of protocol/pseudogradient/."""

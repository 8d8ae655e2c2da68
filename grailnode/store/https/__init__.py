"""Reads objects over HTTPS from servers that strangers operate. Imports protocol and roles.ports."""

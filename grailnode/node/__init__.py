"""A node's operating system processes: what starts, supervises and assembles them. Imports every
room of grailnode but ui, demo and cli.
"""

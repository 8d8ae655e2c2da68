"""The command line: one file for each verb. Imports every other room of grailnode; no room imports it."""

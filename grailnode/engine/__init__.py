"""Computing a policy: a checkpoint directory, the model and the torch engine behind roles.ports.Engine. Imports no
other room of grailnode.
"""

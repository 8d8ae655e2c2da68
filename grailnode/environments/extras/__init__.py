"""Environments of other libraries, each of an extra of the same name. Only the sandbox imports these modules: a run has
each as a wheel, beside those of its library (grailnode/environments/wheels.py).
"""

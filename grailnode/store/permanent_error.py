"""The one distinction that the port does not make: failures that no repetition can turn into success."""

from roles.ports import StoreError


class PermanentError(StoreError):
    """This store never does what was asked; asking again cannot help."""

"""The error for failures that no retry can mend, which the port does not tell apart from others."""

from roles.ports import StoreError


class PermanentError(StoreError):
    """The store will never carry out this operation; a retry cannot help."""

"""The program: everything that touches the world. Any room may import this package's one class."""


class UserError(Exception):
    """A failure that the operator can repair: its text is one line that says what is wrong, where, and what to do."""

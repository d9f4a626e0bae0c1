"""What this package raises when the person who runs it has to do something."""


class ClusterError(Exception):
    """Something did not work; the message is one line that says what, and where to look."""


class MissingError(ClusterError):
    """The machine lacks something; the message is one line that says what to install or to do."""

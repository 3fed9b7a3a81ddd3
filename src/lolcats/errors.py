"""Exceptions that end a command without a traceback."""


class UserError(Exception):
    """Expected failure: the message says what was expected, what came and what to do.

    Whatever reads what a user gave may raise it; docstrings name it where they say more than its message.
    The command line prints the message without a traceback and exits with status 1.
    """

    suppress_output = False
    """In a run of several processes: another one prints it."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its type, where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); a stage in training has written a checkpoint before."""

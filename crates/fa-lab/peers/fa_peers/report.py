"""What is said of a failure."""

import sys


def log(*parts):
    print("peers:", *parts, file=sys.stderr, flush=True)


def brief(error):
    """One line of an exception, short enough for a table's footnote."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:400]


class Refused(Exception):
    """A peer does not do what was asked for, known without trying."""

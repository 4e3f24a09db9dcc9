"""Text for a terminal, whatever its encoding is."""

import sys


def show(text: str) -> None:
    """Print text. Characters that the encoding of standard output lacks are escaped.

    Names of parameters and paths can have any character. Printing them must not end a job.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))

"""Text for a terminal, whatever its encoding is, or for a pipe that may end early."""

import contextlib
import os
import sys
from collections.abc import Iterator


def show(text: str) -> None:
    """Print text. Characters that the encoding of standard output lacks are escaped.

    Names of parameters and paths can have any character. Printing them must not end a job.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


@contextlib.contextmanager
def reader_may_end() -> Iterator[None]:
    """Exit with status 1, and without a message, if the reader of standard output has ended.

    For example, ``head`` ends when it has read enough lines.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python itself flushes at its end, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

"""Failures of a rank during training."""

import os
import signal
import sys
import time

#: number of steps before the failure
STEP = 6


def load_for_ever():
    time.sleep(3600)


def raise_an_error():
    raise ValueError("a bad batch")


def meet(failure):
    if failure == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif failure == "asleep":
        load_for_ever()
    elif failure == "raises":
        raise_an_error()
    elif failure == "ends":
        sys.exit(0)

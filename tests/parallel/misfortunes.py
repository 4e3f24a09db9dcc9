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


def meet(misfortune):
    if misfortune == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif misfortune == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif misfortune == "asleep":
        load_for_ever()
    elif misfortune == "raises":
        raise_an_error()
    elif misfortune == "ends":
        sys.exit(0)

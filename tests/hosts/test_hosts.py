"""Training between hosts that are network namespaces of this machine, under the real horovodrun over ssh."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import network  # noqa: E402

_MISSING = network.problems()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason="; ".join(_MISSING))
_WITHOUT_A_MESSAGE = 60  # seconds in which Horovod is to notice; its own time-out for Gloo is 30


def start(hosts, what, directory):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return hosts.horovodrun([HERE / "worker.py", what, directory], environment)



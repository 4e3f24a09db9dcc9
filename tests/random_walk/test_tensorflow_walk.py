"""Run random programs over the API for TensorFlow on 2 and 3 ranks; see tensorflow_walk.py."""

import importlib.util

import pytest
from launch import horovodrun, shown

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
    ),
]


@pytest.mark.parametrize(("processes", "seeds"), [(2, "0-9"), (3, "1000-1007")])
def test_programs_do_what_the_oracle_says(processes, seeds):
    finished = horovodrun(processes, "../random_walk/tensorflow_walk.py", "--seeds", seeds)
    assert finished.returncode == 0, shown(finished.stdout)

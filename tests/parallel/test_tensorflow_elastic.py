"""Test elastic training on TensorFlow, with the states of deepreduce_hvd.tensorflow.elastic."""

import importlib.util

import pytest
from elastic_job import Job, come_and_go

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
    ),
]


@pytest.mark.parametrize(
    ("settings", "removal"),
    [
        ("allgather", "after a commit"),
        ("doubling", "without a commit"),
        ("auto", "without a commit"),
        ("loss scale", "after a commit"),
    ],
)
def test_ranks_come_and_go(tmp_path, settings, removal):
    job = Job(tmp_path, "tensorflow_elastic.py", settings, "ours")
    come_and_go(job, removal, keeps=settings != "auto")


def test_a_state_that_does_not_keep_the_compressor_is_refused(tmp_path):
    job = Job(tmp_path, "tensorflow_elastic.py", "allgather", "stock")
    try:
        assert job.process.wait(timeout=240) != 0
        assert "elastic training: expected an elastic state with the compressor" in job.output()
    finally:
        job.close()

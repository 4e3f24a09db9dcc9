"""Test every communicator on TensorFlow with horovodrun, on 2 and 3 ranks."""

from launch import needs_tensorflow, scenario_tests

pytestmark = needs_tensorflow
# all are slow; some of PyTorch's are in the default run
reports, test_scenario = scenario_tests(
    "tensorflow_communicators.py", ranks=(), slow_ranks=(2, 3), on_every_number="all"
)

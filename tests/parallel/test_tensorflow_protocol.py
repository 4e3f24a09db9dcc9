"""Test what ranks must agree on, with stock Horovod and TensorFlow, on 2 and 3 ranks."""

from launch import needs_tensorflow, scenario_tests

pytestmark = needs_tensorflow
reports, test_scenario = scenario_tests("tensorflow_protocol.py")

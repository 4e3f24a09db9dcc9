"""Test training with the dictionaries of GRACE and DeepReduce, on 2 ranks."""

from launch import scenario_tests

# tests/test_params.py translates all of them in one process
reports, test_scenario = scenario_tests("torch_published.py", ranks=(), slow_ranks=(2,))

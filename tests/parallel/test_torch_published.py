"""Training with the dictionaries of GRACE and DeepReduce, on 2 ranks."""

from launch import scenario_tests

reports, test_scenario = scenario_tests("torch_published.py", slow_ranks=())

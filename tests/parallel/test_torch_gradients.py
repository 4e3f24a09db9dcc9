"""Test gradients of every kind on stock Horovod and PyTorch, on 2 and 3 ranks."""

from launch import scenario_tests

reports, test_scenario = scenario_tests("torch_gradients.py")

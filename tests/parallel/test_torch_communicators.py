"""Test every communicator with horovodrun, on 2, 3 and 4 ranks."""

from launch import scenario_tests

reports, test_scenario = scenario_tests(
    "torch_communicators.py", slow_ranks=(3, 4), on_every_number="all"
)

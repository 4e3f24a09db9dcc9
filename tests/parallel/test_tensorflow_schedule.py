"""Test ``schedule="auto"`` on stock Horovod and TensorFlow on 2 and 3 ranks, with horovodrun."""

from launch import needs_tensorflow, scenario_tests, scenarios

pytestmark = needs_tensorflow
_SCRIPTS = (
    "tensorflow_schedule.py", "tensorflow_changing_plans.py", "tensorflow_planned_tables.py",
)  # fmt: skip
_QUICK = (
    "a_compressor_that_is_not_told_of_steps",
    "auto_measures_and_decides_alike",
    "plans_that_change_in_every_step_lose_nothing",
)
_ALL = [name for script in _SCRIPTS for name in scenarios(script)]
reports, test_scenario = scenario_tests(
    *_SCRIPTS, slow_scenarios=[name for name in _ALL if name not in _QUICK]
)

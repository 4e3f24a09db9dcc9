"""Test steps that loss scaling skips, on TensorFlow with 2 and 3 ranks."""

from launch import needs_tensorflow, scenario_tests

pytestmark = needs_tensorflow
reports, test_scenario = scenario_tests(
    "tensorflow_overflow.py",
    "tensorflow_loss_scale.py",
    "tensorflow_scaled_reductions.py",
    slow_ranks=(),  # void steps do not depend on the number of ranks
    slow_scenarios=(
        "a_checkpoint_after_a_void_step",
        "a_sum_that_overflows_with_every_communicator",
        "gradients_of_two_calls_are_no_step_of_a_scaled_optimizer",
        "memories_follow_the_loss_scale",
        "a_loss_scale_that_is_none",
        "a_model_that_is_compiled_again_with_another_scale",
        "two_scales_need_two_compressors",
        "without_loss_scaling_nothing_is_added",
    ),
)

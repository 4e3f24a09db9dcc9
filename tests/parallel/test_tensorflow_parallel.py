"""Stock Horovod and TensorFlow on 2 and 3 ranks, with horovodrun."""

from launch import failure_test, needs_tensorflow, scenario_tests, scenarios

pytestmark = needs_tensorflow
reports, test_scenario = scenario_tests(
    "tensorflow_scenarios.py",
    "tensorflow_several.py",
    "tensorflow_states.py",
    "tensorflow_variables.py",
    "tensorflow_refusals.py",
    slow_scenarios=(
        "resumed_equals_uninterrupted",
        "two_compressors_in_one_function",
        "eager_and_graph_agree",
        "retracing_keeps_the_residuals",
        "a_schedule_stays_out_of_graphs",
        *scenarios("tensorflow_refusals.py"),
    ),
    fewest_ranks_only=(
        "a_schedule_stays_out_of_graphs",
        "every_variable_travels_its_own_way",
        "keras_layers_of_equal_shape",
        "keras_optimizer_and_fit",
        "keras_state_with_the_callbacks_of_horovod",
        "memory_of_variables_that_are_gone",
        "prepared_optimizers",
        "retracing_keeps_the_residuals",
        "sources_in_any_order_and_number",
    ),
)

test_failure_ends_the_job_with_a_message_on_every_rank = failure_test(
    "tensorflow_failures.py",
    quick={
        "a_codec_fails_on_one_rank": (
            r"parameter (?:kernel\d|bias0): rank 1: InvalidArgumentError: values: expected "
            r"good ones, got others"
        )
    },
)

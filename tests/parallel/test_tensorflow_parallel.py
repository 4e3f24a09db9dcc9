"""Stock Horovod and TensorFlow on 2 and 3 ranks, with horovodrun."""

from launch import failure_test, needs_tensorflow, scenario_tests

pytestmark = needs_tensorflow
reports, test_scenario = scenario_tests(
    "tensorflow_scenarios.py",
    "tensorflow_several.py",
    "tensorflow_states.py",
    "tensorflow_variables.py",
    slow_scenarios=(
        "resumed_equals_uninterrupted",
        "two_compressors_in_one_function",
        "eager_and_graph_agree",
        "retracing_keeps_the_residuals",
        "a_schedule_stays_out_of_graphs",
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
    slow={
        "xla": r"expected a function without XLA, got one with jit_compile=True",
        "other_codec_on_one_rank": r"expected the same compressor configuration on every rank",
        "slices_out_of_range_on_one_rank": r"parameter table: rank 1: slices: expected indices of 0 to 999, got 1000",
        "other_process_set": r"expected Horovod to sum or average over the",
        "min_as_the_operation": r"expected Horovod to sum or average",
        "adasum": r"[Aa]dasum|expected Horovod to sum or average",
        "unnamed_gradient": r"one of the 4 named parameters, got the gradient of kernel2:0, of shape \(40, 3\)",
        "unknown_shape": r"one of shape \(None, 16\), which could be that of a, b; name the variable",
    },
)

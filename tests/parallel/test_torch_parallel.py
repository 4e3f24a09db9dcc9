"""Stock Horovod and PyTorch on 2 and 3 ranks, with horovodrun."""

from launch import failure_test, scenario_tests

reports, test_scenario = scenario_tests(
    "torch_scenarios.py", "torch_states.py", slow_scenarios=("every_codec_with_every_memory",)
)

_OTHER_CONFIGURATION = r"expected the same compressor configuration on every rank"

test_failure_ends_the_job_with_a_message_on_every_rank = failure_test(
    "torch_failures.py",
    quick={
        "bad_gradient_type_on_one_rank": (
            r"rank 1: InvalidArgumentError: gradient: expected torch\.float32, .*, got "
            r"torch\.complex64"
        ),
        "other_codec_on_one_rank": _OTHER_CONFIGURATION,
    },
    slow={
        "adasum": r"expected a gradient, got a parameter, which op=Adasum passes",
        "other_k_in_rounds": _OTHER_CONFIGURATION,
        "other_communicator_on_one_rank": _OTHER_CONFIGURATION,
        "other_order_on_one_rank": _OTHER_CONFIGURATION,
        "other_layers_frozen_on_one_rank": r"freeze the same ones",
        "other_process_set": (
            r"expected Horovod to sum or average over the 1 ranks of the compressor's process "
            r"set"
        ),
        "min_as_the_operation": r"expected Horovod to sum or average",
        "elastic_state_without_the_compressor": r"elastic training: expected an elastic state with the compressor",
        "unnamed_gradient": r"expected the gradient of one of the 6 named parameters",
    },
)

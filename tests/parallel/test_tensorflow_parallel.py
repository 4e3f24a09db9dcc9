"""Test stock Horovod and TensorFlow on 2 and 3 ranks, with horovodrun."""

from launch import TENSORFLOW_SCENARIOS, failure_test, needs_tensorflow, scenario_tests, scenarios

pytestmark = needs_tensorflow
reports, test_scenario = scenario_tests(
    *TENSORFLOW_SCENARIOS,
    slow_scenarios=(
        "resumed_equals_uninterrupted",
        "two_compressors_in_one_function",
        "eager_and_graph_agree",
        "retracing_keeps_the_residuals",
        "a_schedule_stays_out_of_graphs",
        "every_variable_travels_its_own_way",
        "messages_of_a_plan",
        "prepared_optimizers",
        "models_of_keras_that_train_from_other_values_are_named",
        "a_checkpoint_knows_the_tables",
        "a_loss_scale_beside_a_tape_is_needed",
        "a_memory_of_the_users_own",
        "a_prepared_optimizer_without_compression_is_warned_of",
        "gradient_dtypes",
        "momentum_beside_a_tape_is_named",
        "one_tensor_that_is_the_gradient_of_two_variables",
        "sources_in_any_order_and_number",
        "tables_are_named_in_one_warning",
        "tables_keep_the_momentum_of_a_prepared_optimizer",
        "keras_layers_of_equal_shape",
        "legacy_optimizers",
        "nothing_of_a_table_is_lost_on_other_ways",
        "slices_of_many_random_programs",
        "tables_of_keras_are_found_or_named",
        "tables_of_many_random_programs",
        "tables_of_single_gradients",
        "tables_that_are_not_delayed_need_no_warning",
        "version_1_optimizer",
        "void_steps_and_loss_scales_change_nothing_else",
        *scenarios("tensorflow_misuse.py"),
        *scenarios("tensorflow_refusals.py"),
        *scenarios("tensorflow_saved_models.py"),
    ),
    on_more_ranks=(
        "a_non_finite_gradient_reaches_every_rank",
        "allreduce_alone",
        "average_is_the_mean_of_what_payloads_decode_to",
        "embeddings",
        "every_codec_and_memory",
        "groups_change_nothing_but_the_messages",
        "process_set",
        "ranks_that_train_from_other_values_are_named",
        "slices_out_of_range_on_one_rank",
        "states_of_another_world_size",
        "sum_and_predivide",
        "two_functions_of_equal_shapes",
    ),
    on_every_number=("states_of_another_world_size",),
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

"""Tests that hold on the CPU only, and why: they are skipped where the others run on the fake."""

_REASONS = {
    "says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like": """
        test_attributes_are_torchs test_autocast_reaches_the_ranks test_counters_say_what_ran test_exact_bytes
        test_exact_bytes_of_every_step test_failure_in_a_replica_has_type_text_cause_and_notes
        test_minus_one_is_the_cpu_with_torchs_warning test_module_on_the_wrong_device
        test_one_device_runs_the_module_itself_in_this_thread test_ring_order
        test_the_counters_know_every_byte test_each_rank_has_its_rows_its_thread_and_the_same_values
        test_the_constructor_moves_the_module_for_one_device_only
    """,
    "gives a replica, or adds up, tensors of several ranks without moving them": """
        test_a_twin_of_a_twin test_bound_methods_are_bound_to_the_twin test_overridden_methods_are_used
        test_own_setattr_sees_the_tensors test_own_way_of_copying_is_called_once_per_rank
        test_script_module_inside_a_python_module test_backward_puts_the_gradient_together test_channels_last_stays
        test_double_backward test_replicate_gives_every_rank_the_whole test_scalar_tensors_are_copied_to_every_rank
        test_shares_are_kept_within_a_row_and_lose_none test_views_of_all_sorts
    """,
    "ranks of one device are given views": """
        test_objects_of_a_step_are_cut_into_views test_what_a_graph_goes_through_is_no_view
        test_objects_of_a_step_must_agree
    """,
    "a wrapper in a wrapper names the outer one's first device, and the outer's other ranks are elsewhere": """
        test_data_parallel_inside_data_parallel test_ranks_in_a_rank_draw_one_result
        test_nothing_is_warned_of_where_nothing_is_lost
    """,
    "packed sequences keep their lengths on the CPU, and are made here with a default device": """
        test_one_rank_takes_what_cannot_be_cut test_packed_nested_and_sparse_inputs_are_refused_with_path
        test_replicate_of_a_packed_sequence
    """,
    "several devices have several autograd threads, and no order between them": """
        test_last_bucket_is_reduced_before_the_last_modules_backward
    """,
    "torch's own operators crash on tensors without memory that are on a device of this kind": """
        test_gradients_that_are_zero_everywhere
    """,
    "a frozen script has its weights as constants, on one device": """
        test_frozen_scripts
    """,
    "torch's cache of parametrizations is one for all replicas, whose devices differ": """
        test_cached_parametrization
    """,
    "says cpu in what it expects, mixes numpy's arrays in, or wants what a device cannot know in time": """
        test_arrays_of_other_libraries test_refusals test_an_index_out_of_range_writes_nothing
    """,
}

CPU_ONLY = {name: reason for reason, names in _REASONS.items() for name in names.split()}

"""Which tests the gate (`make test`) runs, and why the complete suite alone (`make test-all`) has the others.

The gate holds what is fast and certain, and shows each thing once. Rows are regular expressions that are looked for in
the ids of tests. A row that finds none fails the gate, so that the tables say what there is.
"""

from __future__ import annotations

import os
import re
from functools import cache

GATE = os.environ.get("DISTTRAIN_TESTS") == "gate"
"""Whether these tests are the gate's: limits are short, seeds are fixed, and only its tests run."""


def examples(complete: int) -> int:
    """How many examples a property has: the gate has a third, the same each time."""
    return complete // 3 if GATE else complete


MORE_RANKS = "two ranks show it"
LEARNS = "a figure of learning: longer, and another one on another machine"
PROCESSES = "many processes that are killed or waited for; the gate has one of each kind"
LONG = "long for what it adds"

ONLY_IN_COMPLETE = {
    r"operator/test_any_field\.py.*\[(job|pod at the gate|gated pod)\]": LONG,
    r"operator/test_facts_kept\.py.*reckoned\[(status|tolerations|env|args|text)\]": LONG,
    r"chart/test_null\.py::test_null_elsewhere.*\[(?!global|podLabels|livenessProbe|dashboard\.)": LONG,
    r"benchmarks/test_bare_experts\.py::test_the_bare_loop_has": "what a benchmark compares with, not the product",
    r"agent/test_resolve\.py.*\[1-91": "waits five seconds for a name, as the other rank does",
    r"session/test_session\.py.*bit_for_bit": LONG,
    r"session/test_log_progress\.py::test_more_lines_than": LONG,
    r"operator/test_false_alarms_of_gangs\.py": LONG,
    r"cli/test_plan\.py::test_(what_does_not_fit_a_gpu|a_worker_of_|a_page_has|where_nothing_can_be_)": LONG,
    r"agent/test_deadlocks\.py": LONG,
    r"agent/test_zygote\.py::test_(ranks_start_again|the_first_ranks)": LONG,
    r"agent/test_gang_lost_pods\.py.*(how_many_restarts|amid a restart|place_of_a_lost_one)": PROCESSES,
    r"agent/test_gang_replacements\.py.*nobody leads": PROCESSES,
    r"agent/test_own_programs_in_place\.py::test_a_program_that_fails_while": PROCESSES,
    r"agent/test_gang_agents\.py.*(a_second_restart_follows|below_the_same_agents\[[01])": PROCESSES,
    r"trainer/test_(gradient_sums|resume|equality|collectives|fused)\.py.*[34] ranks": MORE_RANKS,
    r"trainer/test_resume\.py.*\[1 rank": MORE_RANKS,
    r"trainer/test_resume\.py.*(without momentum|-BF16|-SGD\]|factor|static|late, |devices|state, p)": LONG,
    r"trainer/test_resume\.py.*-Muon\]": "with shards it has more to do",
    r"trainer/test_layouts\.py.*\[(dp2|one process, .*), (Muon|Adafactor)\]": LONG,
    r"trainer/test_local_sgd\.py.*(\[[34]-|-[34]\])": MORE_RANKS,
    r"trainer/test_pipedream\.py.*([34] stages|two replicas|accumulated|drained for)": MORE_RANKS,
    r"trainer/test_(compression_learns|relaxed_learning|text_learns)\.py": LEARNS,
    r"trainer/test_(moe|any_job|any_server_job|meta_device|half_precision|weights)\.py": LONG,
    r"trainer/test_(parameter_server_(faults|strangers)|worker_groups|worker_group_faults)\.py": PROCESSES,
    r"trainer/test_(object_store|ownership|background_saves|torchrun|sinks|hostile_peer)\.py": PROCESSES,
    r"trainer/test_survivors\.py.*\[(rank 0 in|with (b|s|an av)|while it r|in FP16|att|uid|lay|norm|drop)": PROCESSES,
    r"trainer/test_surviving_parts\.py": PROCESSES,
    r"trainer/test_verify\.py::test_kills_at_any_byte": PROCESSES,
    r"trainer/test_checkpoint\.py::(TestSigterm|TestFullStorage)": PROCESSES,
    r"trainer/test_endings\.py::test_storage_that_ranks_do_not_share": PROCESSES,
    r"trainer/test_pipedream_endings\.py::test_a_killed_stage": PROCESSES,
    r"trainer/test_preflight\.py::test_a_node_that_(swallows|keeps_the_others)": PROCESSES,
    r"trainer/test_layouts\.py.*(20 steps|three stages)": LONG,
    r"trainer/test_host_collectives\.py.*(AdamW|vocabulary)": LONG,
    r"trainer/test_local_sgd\.py.*within_a_block.*\[(buffers|dropout|BMUF, o)": LONG,
    r"trainer/test_pipedream\.py.*(compiled|granite|now and then)": LONG,
    r"trainer/test_hostile_checkpoints\.py.*\[(deep as a key|one list of parts)": LONG,
    r"trainer/test_choices\.py::test_(every_layout|without_a_tokenizer)": PROCESSES,
    r"trainer/test_samples\.py::test_(with_parameter_servers|where_one_replica)": PROCESSES,
    r"trainer/test_lm_eval\.py": "installs packages",
    r"trainer/test_ema\.py.*FP32": LONG,
    r"trainer/test_false_alarms\.py": LONG,
    r"trainer/test_loading\.py.*\[(shards|local)": LONG,
    r"trainer/test_stream\.py.*((fsdp2|graph|sgd|task)-at 3|graph-resumed)": LONG,
    r"trainer/test_tasks\.py::test_an_example_learns\[[dms]": LEARNS,
    r"trainer/test_transformers_layouts\.py.*sequence, (olmo2|phi3|qwen3)": LONG,
    r"trainer/test_(document_mask|packing)\.py.*((dp2|ring), compiled|pp3|zero bubble|of a|p2, windows|p2 x|cp4)": LONG,
    r"trainer/test_transformers_exports\.py": LONG,
    r"benchmarks/test_gpu_llama\.py::test_the_trainer": LONG,
    r"trainer/test_transformers_layouts\.py.*\[(.*, (mistral|smollm3)|pp2, [1A-Z])": LONG,
    r"trainer/test_transformers_layouts\.py.*\[(cp4|\w+ (of|x) )": LONG,
    r"trainer/test_transformers_weights\.py.*(fsdp2-files|tp2-adapted|pp2-files)": LONG,
    r"trainer/test_transformers_experts\.py.*\[(dp2|fsdp2, |fsdp2 \+ ep2, [lq]|tp2, s|fsdp4|\w+ x|cp2 \+)": LONG,
    r"trainer/test_transformers_experts\.py.*\[pp2(\]|, I|, balanced(\]|, [GLZD1]|, Interleaved1))": LONG,
    r"trainer/test_transformers_expert_files\.py.*\[(pp2-mix|tp2)": LONG,
    r"trainer/test_sync_batch_norm\.py.* x fsdp2": MORE_RANKS,
    r"trainer/test_float8\.py.* x tp": MORE_RANKS,
    r"trainer/test_float8\.py::test_products_that_are_emulated": "not every processor has such products",
    r"trainer/test_dpo\.py.*\[tp2": LONG,
    r"trainer/test_layouts\.py::test_a_job_stopped_in_one_layout": LONG,
    r"trainer/test_sample_ids\.py.*\[(two ranks-|four|two, four)": MORE_RANKS,
    r"trainer/test_no_rank_holds_the_model\.py": LONG,
    r"trainer/test_chat_adapters\.py.*\[(dp2|fsdp2|tp2)\]": LONG,
    r"trainer/test_continued_adapters\.py.*\[(dp2|fsdp2|tp2)\]": LONG,
    r"trainer/test_json_collectives\.py.*a (negative length|large share)": "waits ten seconds for a peer",
    r"trainer/test_estimate\.py::test_ranks_hold_what_was_estimated\[(.*[,+x]|tp2)": LONG,
    r"trainer/test_estimated_work\.py::test_sockets_send_what_was_estimated\[(cp2|.*[,+])": LONG,
    r"trainer/test_estimated_work\.py::test_stages_hand": LONG,
    r"trainer/test_estimated_work\.py::test_ranks_share_.*\[([df].*, acc|tp2, s|pp2, [tiz]|local)": LONG,
    r"trainer/test_document_mask\.py.*\[qwen(3|2, windows)-compiled": LONG,
    r"trainer/test_estimated_work\.py::test_ranks_that_are_one_worker": LONG,
    r"trainer/test_estimated_work\.py::test_workers_push_pull_and_hold_what_was_estimated\[[TOFp]": LONG,
    r"cli/test_layouts\.py::test_(a_ranking_as_json|what_cannot_be_ranked)": LONG,
    r"trainer/test_local_sgd\.py::test_pods_average_more_often_than_all": MORE_RANKS,
    r"trainer/test_pipedream\.py.*(fewer steps than stages|one step|-[34]\])": MORE_RANKS,
    r"trainer/test_gradient_sums\.py::test_another_number_of_replicas": LONG,
    r"trainer/test_chunked_loss_layouts\.py.*\[(?!(dp2|fsdp2, llama, tied|tp2, everything|pp2, (1F1B|I.*Z.*))\])": LONG,
    r"trainer/test_(chunked_loss\.py::test_compiled|transformers_compiled\.py)": "compiling takes minutes",
    r"trainer/test_compiled\.py::test_model_and_loss_are_one": "compiling takes long",
    r"trainer/test_async_tensor\.py::test_products": "compiling takes long",
    r"trainer/test_slow_ranks\.py::test_the_slow_rank_is_reported": LONG,
    r"trainer/test_estimate\.py::test_the_first_rank_of_a_worker": LONG,
    r"trainer/test_loading\.py::test_nothing_outlives": PROCESSES,
    r"trainer/test_layer_order\.py::test_ranks_that_wait_for_each_other": PROCESSES,
    r"benchmarks/test_gpu_record\.py::test_all_that": LONG,
    r"trainer/test_shardable\.py::test_beside_other_degrees_too": MORE_RANKS,
    r"trainer/test_estimated_work\.py.*\[(?!fsdp2\]|dp2\])": LONG,
    r"trainer/test_stream\.py::test_parts_of_replicas": "lines, which are such data, are trained on in replicas",
    r"trainer/test_dpo\.py::test_the_margin": LONG,
    r"trainer/test_ema\.py::test_the_average_in_a_checkpoint": LONG,
    r"trainer/test_fused\.py::test_one_kernel.*replicas": MORE_RANKS,
    r"trainer/test_float8\.py::test_layouts_compute_alike": LONG,
    r"trainer/test_skipped_steps\.py::test_layouts_skip_alike": LONG,
    r"session/test_session\.py::test_a_former_generation": PROCESSES,
    r"cli/test_plan\.py::test_what_cannot_be_planned": LONG,
    r"unit/test_run\.py::test_(a_few_tests|tests_that_fail)": "the gate itself, which seldom changes",
    r"benchmarks/test_gpu_gpt2\.py::test_without_a_gpu": LONG,
    r"agent/test_out_of_memory\.py::test_one_that_runs_out_of_memory_again": PROCESSES,
    r"agent/test_restarts_in_place\.py::test_a_flood": PROCESSES,
    r"agent/test_gang_agents\.py::test_(a_failure_that_comes|ranks_of_several|a_rank_that_fails_while)": PROCESSES,
    r"agent/test_own_programs_in_place\.py.*\[1\]": PROCESSES,
    r"integration/test_(fuzz|rules_agree|two_releases)\.py": LONG,
    r"integration/test_bounds\.py.*nests_too_deeply.*\[7": LONG,
    r"integration/test_operator_faults\.py::test_an_operator_that_is_killed_during": PROCESSES,
    r"local/test_training\.py::test_ctrl_c_suspends": PROCESSES,
    r"local/test_own_commands\.py::test_a_failing_program": PROCESSES,
    r"agent/test_gang_agents\.py::test_no_pod_starts_again_before": PROCESSES,
    r"agent/test_trainer_ends\.py": PROCESSES,
    r"agent/test_resolve\.py.*\[0-95": "waits five seconds for a name",
    r"agent/test_agent\.py::test_peers_that_do_not_stop": PROCESSES,
    r"agent/test_own_programs_in_place\.py::test_(a_pod_in_place|no_launcher)": PROCESSES,
    r"agent/test_gang_lost_pods\.py::test_(a_pod_whose_place|a_pod_in_place|worker_0s_pod|a_pod_that_waits)": PROCESSES,
    r"operator/test_settings\.py::test_an_informer_that_is_answered": LONG,
    r"session/test_agent\.py::test_the_agent_of_a_program_that_is_killed": PROCESSES,
    r"dashboard/test_in_cluster\.py::test_half_requests": PROCESSES,
    r"integration/test_undecodable\.py::test_a_job_that_cannot_be_read": LONG,
    r"integration/test_submit\.py::test_wait_outlives": PROCESSES,
    r"integration/test_queue_label\.py": LONG,
    r"trainer/test_activations\.py::test_running_statistics": LONG,
    r"trainer/test_callbacks\.py::test_ranks_are_called_alike": MORE_RANKS,
    r"trainer/test_(document_mask|packing)\.py::test_a_layout_equals": "lines and chats show two of them",
    r"trainer/test_(chunked_loss_layouts|sync_batch_norm|transformers_expert_files)\.py": LONG,
    r"trainer/test_samples\.py::test_every_layout": LONG,
    r"trainer/test_layouts\.py.*\[(dp2 x|pp2 x [fc]|cp2 x|cp4)": MORE_RANKS,
    r"trainer/test_resume\.py.*(extra state\]|noise|dropout)": LONG,
    r"trainer/test_resume\.py::test_a_run_stopped_before_its_first_step": LONG,
    r"trainer/test_compiled\.py::test_targets_that_do_not_fit": "compiling takes long",
    r"trainer/test_dpo\.py::test_a_resumed_job": LONG,
    r"trainer/test_skipped_steps\.py::test_(a_norm_far|a_loss_far|layouts_judge|too_many)": MORE_RANKS,
    r"trainer/test_stream\.py::test_(a_job_goes|data_that|a_position_that|other_data)": "lines are such data",
    r"cli/test_layouts\.py::test_a_ranking_is_written": LONG,
    r"integration/test_older_jobs\.py": LONG,
    r"trainer/test_attention_kernels\.py::test_every_kernel_learns": LEARNS,
    r"trainer/test_transformers_weights\.py.*killed_amid_an_export.*\[0": PROCESSES,
    r"trainer/test_losses\.py::test_losses_of_half_precision.*\[CrossEntropy-True": "compiling takes long",
    r"trainer/test_dpo\.py::test_(the_manifest_of_the_job_exports|a_task_that_does_not_say)": LONG,
    r"trainer/test_ema\.py::test_stages": LONG,
    r"trainer/test_float8\.py::test_the_gradients_of_shards": LONG,
    r"trainer/test_lines\.py.*\[(tp2-one|few)": LONG,
    r"trainer/test_local_sgd\.py.*\[2-(each clips|post|BMUF, (classic|optim))": LONG,
    r"trainer/test_local_sgd\.py.*within_a_block.*\[(post|DiLoCo)": LONG,
    r"trainer/test_local_sgd\.py::test_period_1.*\[(experts|a param|two)": LONG,
    r"trainer/test_fused\.py.*\[((tensor|pipeline|shards), A|(experts|versions of weights|shards, resumed), S)": LONG,
    r"trainer/test_loading\.py.*whoever_reads.*\[(pipeline-(here|ahead\])|flushless-(here|ahead\]))": LONG,
    r"trainer/test_survivors\.py.*while it evaluates": PROCESSES,
    r"trainer/test_layouts\.py.*\[fsdp2 x tp2, everything": MORE_RANKS,
    r"agent/test_hangs_in_place\.py.*\[one rank": PROCESSES,
    r"agent/test_agent\.py::test_the_first_failing_rank_decides\[(sys\.exit\(8|.*SEGV)": PROCESSES,
    r"operator/test_lease\.py::test_on_a_slow_api_server.*\[[014]": LONG,
    r"chart/test_null\.py::test_null_where": LONG,
    r"benchmarks/test_gpu_llama\.py::test_the_parameters": LONG,
    r"api/test_yaml_bounds\.py.*more values than a job has": LONG,
    r"decide/test_startup\.py::test_without_a_deadline": LONG,
    r"cli/test_corpora_segments\.py.*gz-2": LONG,
}
"""By expression, why."""

IN_GATE = {
    "tests/integration/": (
        r"/test_(bounds|crd|crd_life|rules_agree|operator|isolation|submit|older_jobs|ways_in|queue_label)\.py",
        r"/test_fuzz\.py::test_validate_and_the_api_server_agree",
        r"/test_operator_faults\.py::test_an_operator_that_is_killed_during_a_restart_counts_it_once",
        r"/test_operator_faults\.py::test_what_happens_while_the_operator_is_down_is_seen",
        r"/test_operator_faults\.py::test_the_operator_survives_the_api_server",
        r"/test_operator_faults\.py::test_missing_rights_are_named_in_one_line",
        r"/test_operator_faults\.py::test_sigterm_ends_the_operator_at_once_and_cleanly",
        r"/test_undecodable\.py::test_a_job_that_cannot_be_read_is_named_and_left_alone",
        r"/test_two_releases\.py::test_a_second_release_that_helm_did_not_refuse",
    ),
    "tests/local/": (
        r"/test_training\.py::test_the_ddp_example_learns_the_digits",
        r"/test_training\.py::test_a_killed_rank_restarts_the_gang",
        r"/test_restarts_in_place\.py::test_a_killed_rank_starts_again_in_its_pod",
        r"/test_own_restarts_in_place\.py::test_used_up_restarts_in_place_recreate_the_pods",
        r"/test_training\.py::test_ctrl_c_suspends_after_a_checkpoint",
        r"/test_own_commands\.py::test_an_unmodified_torchrun_script_runs_without_arguments\[1\]",
        r"/test_own_commands\.py::test_a_(failing_program_fails|program_that_does_not|second_ctrl_c)",
        r"/test_own_commands\.py::test_no_process_outlives_a_runner_that_was_killed",
        r"/test_own_commands\.py::test_sigterm_and_a_closed_terminal_suspend",
        r"/test_limits\.py::test_a_model_of_a_trillion_parameters_is_refused",
        r"/test_environment\.py::test_the_environment_is_the_users",
    ),
}
"""What the gate has of folders of which it has little. They start many processes, and take ten minutes each."""

ROWS = (*ONLY_IN_COMPLETE, *(row for rows in IN_GATE.values() for row in rows))


def rows_of(test: str) -> set[str]:
    """The rows that find the test with this id."""
    rows = {row for row in ONLY_IN_COMPLETE if _compiled(row).search(test)}
    return rows | {row for row in _wanted(test) or () if _compiled(row).search(test)}


def in_gate(test: str, rows: set[str]) -> bool:
    """Whether the gate has the test with this id, which these rows find."""
    wanted = _wanted(test)
    return rows.isdisjoint(ONLY_IN_COMPLETE) and (wanted is None or not rows.isdisjoint(wanted))


def _wanted(test: str) -> tuple[str, ...] | None:
    return next((rows for folder, rows in IN_GATE.items() if test.startswith(folder)), None)


_compiled = cache(re.compile)

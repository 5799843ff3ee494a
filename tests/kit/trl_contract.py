"""Upstream's methods and state that the trainers rely on, which `test_trl_contract.py` compares with TRL."""

# Method name -> "wrapped" (calls super() and post-processes) or "replaced" (ours alone).
OVERRIDDEN = {
    "__init__": "wrapped",
    "_get_per_token_logps_and_entropies": "wrapped",
    "_generate_and_score_completions": "replaced",
    "_prepare_inputs": "replaced",
    "_compute_loss": "replaced",
    "training_step": "wrapped",
    "create_optimizer": "wrapped",
    "create_accelerator_and_postprocess": "wrapped",
    "_prepare_for_training": "wrapped",
    "_save": "wrapped",
    "_load_from_checkpoint": "wrapped",
    "_load_best_model": "wrapped",
    "evaluate": "wrapped",
    "evaluation_loop": "wrapped",
    "prediction_step": "replaced",
    "get_eval_dataloader": "wrapped",
    "get_test_dataloader": "replaced",
    "_save_checkpoint": "wrapped",
    "_get_output_dir": "wrapped",
    "_get_train_sampler": "wrapped",
    "_init_training_state": "wrapped",
    "_run_epoch": "wrapped",
    "_maybe_log_save_evaluate": "wrapped",
    "_finalize_training": "wrapped",
    "_push_from_checkpoint": "wrapped",
    "push_to_hub": "wrapped",
    "create_model_card": "wrapped",
    "save_model": "wrapped",
    "train": "wrapped",
    "log": "wrapped",
}

# Methods whose bodies we have read, because our rollout step calls or replaces them.
READ = ("_generate", "_generate_single_turn", "_calculate_rewards")
# Methods whose bodies we have read, because we call or replace them; the contract test holds them.
VLLM_READ = (
    *("VLLMGeneration._init_vllm", "VLLMGeneration.generate", "VLLMGeneration.sync_weights"),
    *("VLLMClient.__init__", "VLLMClient._get", "VLLMClient._post", "VLLMClient.check_server"),
    *("VLLMClient.get_server_info", "VLLMClient.generate"),
)

BORROWED_ATTRIBUTES = (
    "_buffered_inputs",
    "_metrics",
    "_logs",
    "_pending_metrics",
    "_pending_extra_logs",
    "_signature_columns",
    "_step",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_tokenizer",
    "_last_loaded_step",
    "_finish_current_push",
    "aux_loss_enabled",
    "beta",
    "chat_template",
    "chat_template_kwargs",
    "environments",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "ref_model",
    "reward_weights",
    "router_aux_loss_coef",
)

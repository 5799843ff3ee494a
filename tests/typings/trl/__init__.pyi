"""What we use of TRL's public and private surface, typed; `tests/test_trl_contract.py` holds it to TRL."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__version__: str

class GRPOConfig(TrainingArguments): ...
class ModelConfig(Any): ...
class DatasetMixtureConfig(Any): ...
class ScriptArguments(Any): ...
class TrlParser(Any): ...

def get_dataset(mixture_config: DatasetMixtureConfig) -> Any: ...
def get_peft_config(model_args: Any) -> Any: ...
def get_quantization_config(model_args: Any) -> Any: ...

class GRPOTrainer:
    # transformers' Trainer
    args: GRPOConfig
    accelerator: Accelerator
    state: TrainerState
    control: TrainerControl
    model: Any
    model_wrapped: Any
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    is_in_train: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    optimizer_cls_and_kwargs: tuple[Any, Any] | None
    hub_model_id: str | None
    # GRPOTrainer
    _tag_names: list[str]
    _name: str
    _paper: dict[str, str]
    ref_model: Any
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: Tensor
    tools: list[Callable[..., Any]]
    environments: list[Any] | None
    rollout_func: Any
    num_generations: int
    num_generations_eval: int
    num_iterations: int
    max_completion_length: int
    pad_to_multiple_of: int | None
    mask_truncated_completions: bool
    loss_type: str
    importance_sampling_level: str
    epsilon_low: float
    epsilon_high: float
    beta: float
    temperature: float
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    log_completions: bool
    eos_token_ids: list[int]
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    generation_config: Any
    generation_kwargs: dict[str, Any]
    use_vllm: bool
    vllm_mode: str
    vllm_generation: Any
    vllm_importance_sampling_correction: bool
    use_transformers_continuous_batching: bool

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None: ...
    def add_callback(self, callback: Any) -> None: ...
    def remove_callback(self, callback: Any) -> None: ...
    def get_train_dataloader(self) -> Any: ...
    def get_eval_dataloader(self, eval_dataset: Any = ...) -> Any: ...
    def get_test_dataloader(self, test_dataset: Any) -> Any: ...
    def get_decay_parameter_names(self, model: Any) -> list[str]: ...
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = ...) -> Any: ...
    def is_world_process_zero(self) -> bool: ...
    @staticmethod
    def get_off_policy_mask(
        advantages: Any,
        per_token_logps: Any,
        sampling_per_token_logps: Any,
        mask: Any,
        off_policy_threshold: Any,
    ) -> Tensor: ...
    def train(
        self, resume_from_checkpoint: Any = ..., trial: Any = ..., ignore_keys_for_eval: Any = ...
    ) -> Any: ...
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor: ...
    def evaluate(
        self, eval_dataset: Any = ..., ignore_keys: Any = ..., metric_key_prefix: Any = ...
    ) -> dict[str, float]: ...
    def evaluation_loop(
        self,
        dataloader: Any,
        description: Any,
        prediction_loss_only: Any = ...,
        ignore_keys: Any = ...,
        metric_key_prefix: Any = ...,
    ) -> Any: ...
    def log(self, logs: Any, start_time: Any = ...) -> None: ...
    def save_model(self, output_dir: Any = ..., _internal_call: Any = ...) -> None: ...
    def push_to_hub(
        self,
        commit_message: Any = ...,
        blocking: Any = ...,
        token: Any = ...,
        revision: Any = ...,
        private: Any = ...,
        **kwargs: Any,
    ) -> Any: ...
    def init_hf_repo(self, token: Any = ..., private: Any = ...) -> None: ...
    def create_model_card(self, model_name: Any = ..., dataset_name: Any = ..., tags: Any = ...) -> None: ...
    def create_optimizer(self, model: Any = ...) -> torch.optim.Optimizer: ...
    def create_accelerator_and_postprocess(self) -> None: ...
    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...
    def _save(self, output_dir: Any = ..., state_dict: Any = ...) -> None: ...
    def _push_from_checkpoint(self, checkpoint_folder: Any) -> None: ...
    def _prepare_for_training(
        self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any: ...
    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = ...) -> None: ...
    def _load_best_model(self) -> None: ...
    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> Any: ...
    def _get_train_sampler(self, dataset: Any = ...) -> Any: ...
    def _get_output_dir(self, trial: Any) -> str: ...
    def _run_epoch(
        self,
        model: Any,
        epoch: Any,
        train_dataloader: Any,
        steps_in_epoch: Any,
        num_update_steps_per_epoch: Any,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: Any,
        resume_from_checkpoint: Any,
        epochs_trained: Any,
        steps_trained_in_current_epoch: Any,
    ) -> None: ...
    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: Any,
        learning_rate: Any = None,
    ) -> None: ...
    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any: ...
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        batch_size: Any = ...,
        compute_entropy: Any = ...,
        compute_aux_loss: Any = ...,
        pixel_values: Any = ...,
        image_grid_thw: Any = ...,
        num_images: Any = ...,
        pixel_attention_mask: Any = ...,
        spatial_shapes: Any = ...,
        num_tiles: Any = ...,
        image_sizes: Any = ...,
        token_type_ids: Any = ...,
        mm_token_type_ids: Any = ...,
        image_position_ids: Any = ...,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: Any,
        has_tool_images: Any = ...,
    ) -> Any: ...
    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor: ...
    def _set_signature_columns_if_needed(self) -> None: ...

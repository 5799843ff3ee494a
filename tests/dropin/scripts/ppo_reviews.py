"""PPO on short texts with a reward model, as a user of TRL 1.12 writes it."""

import shutil

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config
from trl.experimental.ppo import PPOConfig, PPOTrainer

if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script, training, model = parser.parse_args_into_dataclasses()
    shutil.rmtree(training.output_dir, ignore_errors=True)

    dtype = model.dtype if model.dtype in ("auto", None) else getattr(torch, model.dtype)
    loading = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": dtype,
    }
    quantization = get_quantization_config(model)
    if quantization is not None:
        loading["quantization_config"] = quantization
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    critic, judge = (
        AutoModelForSequenceClassification.from_pretrained(
            training.reward_model_path, num_labels=1, **loading
        )
        for _ in range(2)
    )
    policy = AutoModelForCausalLM.from_pretrained(training.sft_model_path, **loading)
    peft_config = get_peft_config(model)
    reference = None
    if peft_config is None:
        reference = AutoModelForCausalLM.from_pretrained(training.sft_model_path, **loading)

    splits = load_dataset(script.dataset_name, name=script.dataset_config)

    def ids_only(rows):
        """Token ids and their number, without anything else."""

        def tokenise(row):
            ids = tokenizer(row["prompt"], padding=False)["input_ids"]
            return {"input_ids": ids, "lengths": len(ids)}

        columns, workers = rows.column_names, training.dataset_num_proc
        rows = rows.map(tokenise, remove_columns=columns, num_proc=workers)
        return rows.filter(lambda row: row["lengths"] <= 64, num_proc=workers)

    with PartialState().local_main_process_first():
        train = ids_only(splits[script.dataset_train_split])
        held_out = None
        if training.eval_strategy != "no":
            held_out = ids_only(splits[script.dataset_test_split])
    assert train[0]["input_ids"][-1] != tokenizer.eos_token_id

    trainer = PPOTrainer(
        args=training, processing_class=tokenizer, model=policy, ref_model=reference,
        reward_model=judge, value_model=critic, train_dataset=train, eval_dataset=held_out,
        peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.generate_completions()

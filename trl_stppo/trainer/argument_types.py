"""Type aliases of the trainers' arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)

Model: TypeAlias = str | PreTrainedModel | PeftModel
Reward: TypeAlias = str | PreTrainedModel | Callable[..., Any]
Rewards: TypeAlias = Reward | list[Reward]
Rows: TypeAlias = Dataset | IterableDataset
EvaluationRows: TypeAlias = Rows | DatasetDict | IterableDatasetDict | Mapping[str, Rows]
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Tokenizers: TypeAlias = PreTrainedTokenizerBase | list[PreTrainedTokenizerBase]
Callbacks = list[TrainerCallback]
OptimizerAndSchedule = tuple[Optimizer | None, LRScheduler | None]
Quantization = BitsAndBytesConfig
Adapter = PeftConfig
Tools = list[Callable[..., Any]]
RolloutFunc = Callable[..., dict[str, Any]]
AgentFunc = Callable[[Any, dict[str, Any]], Any]
Environments = Callable[[], Any] | dict[str, Callable[[], Any]]

"""What a vLLM on the CPU lacks for training; imported by the server's workers and by colocated trainers.

Nothing but torch and vLLM is imported: a server starts without TRL.
"""

from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers import utils


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


# On a CPU alone, vLLM packs a linear layer's weight and leaves an empty parameter behind, which takes none
# of the weights that come later. Module level, because vLLM imports a worker's extension before its model.
utils.dispatch_cpu_unquantized_gemm = _plain


class PlainWeights:
    """A worker's extension that takes weights from a file: vLLM's own transports need a GPU."""

    model_runner: Any

    def load_weights_of(self, path: str) -> None:
        """Load what a trainer has written."""
        self.model_runner.model.load_weights(iter(load_file(path).items()))

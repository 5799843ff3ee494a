"""Two runs on one machine end with equal bits, wherever their buffers lie, in whichever process they are."""

import json
import subprocess
import sys

import pytest
import torch

from tests.kit import warm

SIZES = [(1, 17, 9), (3, 64, 33), (12, 5, 8), (31, 100, 16), (64, 64, 64)]


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that lies `offset` elements behind a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    start = -(room.data_ptr() // tensor.element_size()) % 16 + offset
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def products(offset: int = 0) -> list[float]:
    """Sums of matrix products whose factors lie there in memory."""
    generator, sums = torch.Generator().manual_seed(0), []
    for dtype in (torch.float32, torch.float64):
        for rows, inner, columns in SIZES:
            x, w = (
                torch.randn(n, inner, generator=generator, dtype=dtype) for n in (rows, columns)
            )
            sums += (
                torch.nn.functional.linear(moved(x, offset), moved(w, offset)).flatten().tolist()
            )
    return sums


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="it is MKL that depends on it")
@pytest.mark.parametrize("offset", range(1, 16))
def test_a_product_does_not_depend_on_where_its_factors_lie(offset):
    assert products(offset) == products()


@pytest.mark.long
def test_another_process_calculates_the_same():
    code = (
        "import json; from tests.test_surroundings import products; print(json.dumps(products()))"
    )
    words = [sys.executable, "-c", code]
    cold = subprocess.run(words, cwd=warm.ROOT, capture_output=True, text=True, check=True)
    assert cold.stdout == warm.run(words, cwd=warm.ROOT).stdout
    assert json.loads(cold.stdout) == products()

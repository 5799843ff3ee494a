"""`torch_compile=True`: turns are sampled with the uncompiled module, updates use the compiled one."""

import pytest
import torch

from tests.kit.builders import LIMITS, TEXT, Kept, build


@pytest.mark.long
def test_a_compiled_policy_samples_and_trains(tmp_path) -> None:
    arguments, options = dict(TEXT), {"temperature": 1.0, **LIMITS}
    plain = build(tmp_path / "plain", Kept, arguments=arguments, **options)
    plain.train()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = build(tmp_path / "compiled", Kept, arguments=arguments, **compiled, **options)
    trainer.train()
    assert hasattr(trainer.model_wrapped, "_orig_mod")
    pairs = zip(plain.rollouts, trainer.rollouts, strict=True)
    for episodes in [zip(a.episodes, b.episodes, strict=True) for a, b in pairs]:
        assert all(one.ids == other.ids for one, other in episodes)
    pairs = zip(plain.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)

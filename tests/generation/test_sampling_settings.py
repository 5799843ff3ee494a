"""Which generation configurations the cached backend can follow."""

import pytest
from transformers import GenerationConfig

from trl_stppo.generation.sampling import _HANDLED, _NEUTRAL, SamplingSettings, shaping

read = SamplingSettings.from_generation_config


def test_what_is_read() -> None:
    settings = {
        "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
    }  # fmt: skip
    ends = {"max_new_tokens": 8, "eos_token_id": [1, 2], "pad_token_id": 0}
    config = GenerationConfig(do_sample=True, disable_compile=True, **settings, **ends)
    assert read(config) == (SamplingSettings(True, 0.7, 0, 0.9, 0.1, 1.2), None)


def test_what_is_left_out_is_as_in_generate() -> None:
    assert read(GenerationConfig()) == (SamplingSettings(False, 1.0, 50, 1.0, None, 1.0), None)
    models = GenerationConfig(do_sample=True, top_k=20, min_p=0.2, temperature=0.6)
    settings, _ = read(GenerationConfig(temperature=1.0, top_k=0), models)
    assert settings == SamplingSettings(True, 1.0, 0, 1.0, 0.2, 1.0)


def test_the_defaults_are_those_of_generate() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    assert {name: defaults.get(name) for name in _HANDLED} == _HANDLED
    assert read(GenerationConfig(**defaults))[1] is None
    assert all(value in _NEUTRAL.get(name, (value,)) for name, value in defaults.items())


@pytest.mark.parametrize(("name", "value"), [
    ("no_repeat_ngram_size", 2),
    ("num_beams", 2),
    ("stop_strings", ["."]),
    ("min_new_tokens", 3),
    ("typical_p", 0.9),
    ("exponential_decay_length_penalty", (3, 1.1)),
    ("remove_invalid_values", True),
    ("guidance_scale", 1.5),
    ("cache_implementation", "static"),
    ("from_a_later_version", 1),
])  # fmt: skip
def test_anything_else_is_refused_by_name(name: str, value) -> None:
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    settings, reason = read(config)
    assert settings is None
    assert f"{name}={value!r}" in reason
    settings, reason = read(GenerationConfig(do_sample=True), config)
    assert settings is None


def test_every_field_of_this_version_is_known() -> None:
    """A field that is refused for any value at all is refused on purpose."""
    for name in vars(GenerationConfig()):
        config = GenerationConfig()
        if getattr(config, name) is None:
            setattr(config, name, _NEUTRAL.get(name, (None,))[0])
        assert read(config)[1] is None


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": -0.5}, {"min_p": 2.0}])
def test_impossible_values_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        SamplingSettings(**bad)


def test_settings_that_shape_the_samples_are_named() -> None:
    config = GenerationConfig(min_p=0.1, typical_p=0.9, epsilon_cutoff=0.02, suppress_tokens=[3])
    config.update(temperature=0.5, top_k=20, eos_token_id=2, no_repeat_ngram_size=0)
    found = shaping(config.to_diff_dict(), ["temperature", "top_k"])
    assert found == ["epsilon_cutoff=0.02", "min_p=0.1", "suppress_tokens=[3]", "typical_p=0.9"]
    assert shaping(GenerationConfig().to_diff_dict(), []) == []

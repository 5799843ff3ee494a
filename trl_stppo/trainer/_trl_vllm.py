"""All uses of private parts of TRL's `VLLMGeneration` and `VLLMClient`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl.generation import vllm_client, vllm_generation

from ..errors import RolloutError
from ..generation.protocol import TurnRequest
from ..generation.sampling import turn_random

# Longest time of one turn on a server, its time in the queue included, in seconds.
TURN_SECONDS = 7200.0
CONNECT_SECONDS = 10.0


@contextmanager
def engine_options(options: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Context manager in which TRL builds its colocated vLLM engine with the additional `options`."""
    original = getattr(vllm_generation, "LLM", None)

    def make(**usual: object) -> object:
        assert original is not None
        more = options()
        try:
            return original(**{**usual, **more})
        except Exception as error:
            if "enable_lora" in more:
                error.add_note("If it is about LoRA: vllm_engine_kwargs={'enable_lora': False} merges it.")
            raise

    vllm_generation.LLM = make
    try:
        yield
    finally:
        vllm_generation.LLM = original


@contextmanager
def awake(vllm: Any) -> Iterator[None]:
    """Context manager that wakes a colocated engine with sleep mode, as `VLLMGeneration.generate` does."""
    if not vllm.enable_sleep_mode:
        yield
        return
    if vllm._llm_weights_sleeping:
        vllm.sync_weights()
    vllm.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        vllm.llm.sleep(level=2)
        vllm._llm_weights_sleeping = True


def turn_options(vllm: Any, *, seeded: bool, adapter: object) -> Callable[[TurnRequest], dict[str, Any]]:
    """Return a function that makes the arguments of the engine's `add_request` for a turn."""
    structure = vllm.generation_kwargs.get("structured_outputs")
    if vllm.structured_outputs_regex is not None:
        structure = {"regex": vllm.structured_outputs_regex}
    if isinstance(structure, dict):
        structure = vllm_generation.StructuredOutputsParams(**structure)

    def options(request: TurnRequest) -> dict[str, Any]:
        sampling = {**_sampling(vllm), **_further(vllm, request, seeded)}
        sampling.setdefault("detokenize", bool(sampling.get("stop")))
        if structure is not None:
            sampling["structured_outputs"] = structure
        return {"params": vllm_generation.SamplingParams(**sampling), "lora_request": adapter}

    return options


def _sampling(vllm: Any) -> dict[str, Any]:
    names = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs")
    return {"n": 1, "min_p": vllm.min_p or 0.0, **{name: getattr(vllm, name) for name in names}}


def _further(vllm: Any, request: TurnRequest, seeded: bool) -> dict[str, Any]:
    """Return the user's `generation_kwargs` with the seed and token limits of one turn."""
    # vLLM takes integers below 2**63.
    sampling = {"seed": turn_random(request.seed).getrandbits(63)} if seeded else {}
    sampling |= {**vllm.generation_kwargs, "logprobs": vllm.logprobs}
    sampling["max_tokens"] = request.max_new_tokens
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], request.max_new_tokens)
    return sampling


def has_adapters(vllm: Any) -> bool:
    """Return whether vLLM is a colocated engine that can load the policy's LoRA adapter."""
    return vllm.mode == "colocate" and vllm.llm.llm_engine.vllm_config.lora_config is not None


def adapter(number: int, folder: str) -> Any:
    """Return vLLM's `LoRARequest` for the adapter saved in `folder`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-{number}", number, folder)


def new_client(vllm: Any, patience: float) -> Any:
    """Make a TRL client that samples turns. It connects within `patience` seconds."""
    url = vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}"
    client: Any = vllm_client.VLLMClient(base_url=url, connection_timeout=patience)
    timeout = (CONNECT_SECONDS, TURN_SECONDS)
    client.session.request = functools.partial(client.session.request, timeout=timeout)
    return client


class TurnClient:
    """Client that samples turns at a vLLM server, for use from several threads.

    `weights` is the name of the policy's weights on the server, or "" if the server stores no names.
    """

    def __init__(self, client: Any, vllm: Any) -> None:
        self.client, self._vllm = client, vllm
        self.weights = ""
        # Samplers of vLLM refuse the seed of a turn that is prefilled in chunks, except on CUDA.
        self._seeded = "cuda" in str(client.get_server_info().get("device_config"))

    def sample(self, request: TurnRequest) -> tuple[list[int], list[float] | None]:
        """Sample a turn; return its token ids and log-probabilities.

        Raises:
            RolloutError: the server has not sampled the turn, or not with the policy's weights.
        """
        vllm, expected = self._vllm, self.weights
        settings = {**_sampling(vllm), "structured_outputs_regex": vllm.structured_outputs_regex}
        settings["generation_kwargs"] = _further(vllm, request, self._seeded)
        try:
            output = self.client.generate([request.ids], **settings)
            (ids,), logprobs = output["completion_ids"], output["logprobs"]
            checked = self._checked(request, ids, [at[0] for at in logprobs[0]])
            url = f"{self.client.base_url}/weight_info"
            present = self.client._get(url)["weight_version"] if expected else ""
        except Exception as error:
            raise failed("has not sampled a turn", error) from error
        if present != expected:
            raise failed("has lost the policy's weights", f"it has {present!r}, not {expected!r}")
        return ids, checked

    def _checked(self, request: TurnRequest, ids: list[int], logprobs: list[float | None]) -> list[Any]:
        """Check a turn's tokens; check and return its log-probabilities, with None for missing values."""
        vocabulary = self._vllm.model.config.get_text_config().vocab_size
        limited, end = ids[: request.max_new_tokens], self._vllm.processing_class.eos_token_id
        bad = [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]
        if bad or not ids:
            raise ValueError(f"a turn is one or more tokens from 0 to {vocabulary - 1}, not {bad[:1]}")
        if end in limited[:-1] and not self._vllm.generation_kwargs.get("ignore_eos"):
            raise ValueError(f"tokens follow the end {end} of a turn")
        # The lower limit allows -9999, which vLLM writes for minus infinity.
        for value in logprobs:
            if value is not None and value == value and not -1e4 <= value <= 1e-3:
                raise ValueError(f"{value} is not a log-probability")
        return logprobs

    def name_weights(self, name: str) -> str:
        """Store `name` on the server for pushed weights; return it, or "" if the server stores no names."""
        if not self._forget_prefixes():
            raise RuntimeError("it does not drop its prefix cache of other weights")
        url = f"{self.client.base_url}/update_weight_version"
        try:
            self.client._post(url, json={"new_version": name})
        except Exception as error:
            if not str(error).startswith("Request failed: 404, "):
                raise
            return ""
        return name

    def _forget_prefixes(self) -> bool:
        """Reset the server's prefix cache, also if turns are running; return whether the reset succeeded."""
        url = f"{self.client.base_url}/reset_prefix_cache?reset_running_requests=true"
        try:
            return bool(self.client._post(url, json={}).get("success", True))
        except ValueError:
            # vLLM before 0.26 gives an empty answer, which is no JSON.
            return True


def failed(what: str, why: object) -> RolloutError:
    """Return an error that ends the run, because a vLLM server failed; its message says how to go on."""
    return RolloutError(
        f"The vLLM server {what} ({why}). Start it again, and resume with `resume_from_checkpoint=True`."
    )

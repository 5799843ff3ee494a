"""All uses of private parts of TRL's `VLLMGeneration` and `VLLMClient`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl.generation import vllm_client, vllm_generation

from ..generation.protocol import TurnRequest
from ..generation.sampling import turn_random
from ..generation.server import ServerError

# Longest time of one turn on a server, its time in the queue included, in seconds.
TURN_SECONDS = 7200.0
CONNECT_SECONDS = 10.0
# Longest time of one request while weights are pushed, in seconds; NCCL limits the transfer itself.
PUSH_SECONDS = 600.0
# HTTP statuses of a server that is down behind a proxy, or too busy.
AWAY = (429, 502, 503, 504)
_STATUS = re.compile(r"Request failed: (\d+), ")


@contextmanager
def engine_options(options: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Context manager in which TRL builds its colocated vLLM engine with the additional `options`."""
    original = getattr(vllm_generation, "LLM", None)

    def make(**usual: Any) -> Any:
        assert original is not None
        more = options()
        try:
            return original(**{**usual, **more})
        except Exception as error:
            if "enable_lora" in more:
                error.add_note(
                    "If it is about LoRA: vllm_engine_kwargs={'enable_lora': False} merges it."
                )
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


def turn_options(vllm: Any, *, seeded: bool, adapter: Any) -> Callable[[TurnRequest], Any]:
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
    """Make a TRL client that samples turns and does not retry. It connects within `patience` seconds."""
    url = vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}"
    client = vllm_client.VLLMClient(base_url=url, connection_timeout=patience)

    for scheme in ("http://", "https://"):
        client.session.mount(scheme, vllm_client.HTTPAdapter(pool_maxsize=1024))
    limit_requests(client, TURN_SECONDS)
    return client


def limit_requests(client: Any, seconds: float) -> None:
    """Limit each request of a TRL client to `seconds`, without repeating unanswered requests."""
    for adapter in client.session.adapters.values():
        adapter.max_retries = adapter.max_retries.new(read=False)
    timeout = (CONNECT_SECONDS, seconds)
    client.session.request = functools.partial(client.session.request, timeout=timeout)


def rejoin(vllm: Any) -> None:
    """Reconnect to a restarted server, so that weights can be sent to it again."""
    vllm.vllm_client.close_communicator()
    vllm.vllm_client.init_communicator(device=vllm.accelerator.device)


class TurnClient:
    """Client that samples turns at a vLLM server, for use from several threads."""

    def __init__(self, client: Any, vllm: Any) -> None:
        self.client, self._vllm = client, vllm
        self.names_weights = False
        # Without CUDA vLLM's samplers refuse the seed of a turn that is prefilled in chunks.
        self._seeded = "cuda" in str(client.get_server_info().get("device_config"))

    def sample(self, request: TurnRequest) -> tuple[list[int], list[float] | None]:
        """Sample a turn; return its token ids and log-probabilities."""
        vllm = self._vllm
        settings = {**_sampling(vllm), "structured_outputs_regex": vllm.structured_outputs_regex}
        settings["generation_kwargs"] = _further(vllm, request, self._seeded)
        with failures():
            output = self.client.generate([request.ids], **settings)
            (ids,), logprobs = output["completion_ids"], output["logprobs"]
            return ids, self._checked(request, ids, [at[0] for at in logprobs[0]])

    def _checked(
        self, request: TurnRequest, ids: list[int], logprobs: list[float | None]
    ) -> list[Any]:
        """Check a turn's tokens; check and return its log-probabilities, with None for missing values."""
        vocabulary = self._vllm.model.config.get_text_config().vocab_size
        limited, end = ids[: request.max_new_tokens], self._vllm.processing_class.eos_token_id
        bad = [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]
        if bad or not ids:
            raise ValueError(
                f"a turn is one or more tokens from 0 to {vocabulary - 1}, not {bad[:1]}"
            )
        if end in limited[:-1] and not self._vllm.generation_kwargs.get("ignore_eos"):
            raise ValueError(f"tokens follow the end {end} of a turn")
        # The lower limit allows -9999, which vLLM writes for minus infinity.
        for value in logprobs:
            if value is not None and value == value and not -1e4 <= value <= 1e-3:
                raise ValueError(f"{value} is not a log-probability")
        return logprobs

    def weights_name(self) -> str:
        """Return the name stored on the server for its weights, or "" if the server stores no names."""
        if not self.names_weights:
            return ""
        with failures():
            url = f"{self.client.base_url}/weight_info"
            return str(self.client._get(url)["weight_version"])

    def name_weights(self, name: str) -> str:
        """Store `name` on the server for pushed weights; return it, or "" if the server stores no names."""
        url = self.client.base_url
        with failures():
            if not self._forget_prefixes():
                raise ServerError("it does not drop its prefix cache of other weights")
            try:
                self.client._post(f"{url}/update_weight_version", json={"new_version": name})
            except Exception as error:
                if _status(error) != 404:
                    raise
                name = ""
        self.names_weights = bool(name)
        return name

    def _forget_prefixes(self) -> bool:
        """Reset the server's prefix cache, also if turns are running; return whether the reset succeeded."""
        url = f"{self.client.base_url}/reset_prefix_cache?reset_running_requests=true"
        try:
            return bool(self.client._post(url, json={}).get("success", True))
        except ValueError:
            # vLLM before 0.26 gives an empty answer, which is no JSON.
            return True


@contextmanager
def failures() -> Iterator[None]:
    """Context manager that turns a server's failures into ServerError, its refusals into RuntimeError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        message = f"its answer cannot be read ({type(error).__name__}: {error})"
        raise ServerError(message) from error
    except OSError as error:
        raise ServerError(f"{type(error).__name__}: {error}", unreachable=True) from error
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        if status < 500 and status not in AWAY:
            raise RuntimeError(f"The vLLM server refuses a turn: {error}") from error
        raise ServerError(str(error), unreachable=status in AWAY) from error


def _status(error: Exception) -> int | None:
    """Return the HTTP status in the text of an error that TRL's client raised, or None."""
    found = _STATUS.match(str(error))
    return int(found[1]) if found else None

"""A stand-in for `vllm serve`, and TRL's own client classes in front of it.

What is real: `VLLMClient.generate` with its request and its reading of the answer, all of
`VLLMGeneration` but the start-up (the collecting of the weights among it), and our own client for turns.
What is not: vLLM, the transport of the weights (NCCL; here they are copied), and `requests`, in whose
place the standard library talks HTTP.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from tests.kit.waiting import PATIENCE
from trl_stppo import PPOTrainer
from trl_stppo.trainer._trl_vllm import TurnClient

# (ids of the prompt, the request) -> sampled ids, their log-probabilities
Sample = Callable[[list[int], dict[str, Any]], tuple[list[int], list[float]]]


class ModelSampler:
    """Samples as vLLM does, token by token, with `--logprobs-mode processed_logprobs`."""

    def __init__(self, model: Any, ends: list[int]) -> None:
        # GRPOTrainer patches its model's forward; a copy's would still run the original's weights.
        assert "forward" not in vars(model)
        self.model, self.ends = model.eval(), ends

    @torch.no_grad()
    def __call__(self, prompt: list[int], request: dict[str, Any]) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        # Of the prompt alone: which prompts come together is a matter of timing.
        random = torch.Generator().manual_seed(sum(i * t for i, t in enumerate(prompt)))
        while len(ids) < len(prompt) + request["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores = (logits / request["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1, generator=random))
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token in self.ends:
                break
        return ids[len(prompt) :], logprobs


class CompletionsServer:
    """Answers `/v1/completions` as vLLM does.

    A fault of the next request is a status, "drop", which closes the connection, or "garbage". The weights
    of a server that has just been started are "default".
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.requests: list[dict[str, Any]] = []
        self.answers: list[tuple[list[int], list[int], list[float]]] = []
        self.faults: list[str | None] = []
        self.weights = "default"
        self.resets = 0
        self.changing = Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions":
                    server.answer(self, body)
                    return
                if self.path == "/update_weight_version":
                    server.weights = body["new_version"]
                else:
                    assert self.path == "/reset_prefix_cache?reset_running_requests=true"
                    server.resets += 1
                server.reply(self, 200, {"success": True})

            def do_GET(self) -> None:
                assert self.path == "/weight_info"
                with server.changing:
                    weights = server.weights
                server.reply(self, 200, {"weight_version": weights})

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        self.requests.append(request)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "drop":
            handler.connection.close()
            return
        if fault == "garbage":
            self.reply(handler, 200, {"choices": [{"token_ids": [7]}]})
        elif fault is not None:
            self.reply(handler, int(fault), {"error": "out of memory"})
        else:
            prompts = [prompt for prompt in request["prompt"] for _ in range(request["n"])]
            choices = [self._choice(prompt, request) for prompt in prompts]
            self.reply(handler, 200, {"choices": choices})

    def restart(self, weights: dict[str, Any]) -> None:
        """Lose the trainer's weights and their name at once, as a new process does."""
        with self.changing:
            self.sample.model.load_state_dict(weights)
            self.weights = "default"

    @staticmethod
    def reply(handler: BaseHTTPRequestHandler, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _choice(self, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
        assert request["return_token_ids"]
        assert request["return_tokens_as_token_ids"]
        ids, logprobs = self.sample(prompt, request)
        self.answers.append((prompt, ids, logprobs))
        names = [f"token_id:{token}" for token in ids]
        tops = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
        told = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops}
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": told}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@dataclass
class Response:
    """What the client reads of an answer."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Session:
    """In place of `requests.Session`."""

    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {}
        self.request = self._answer

    def post(self, url: str, **body: dict[str, Any]) -> Response:
        data = json.dumps(body["json"]).encode()
        return self._answer(urllib.request.Request(url, data=data))

    def get(self, url: str) -> Response:
        if url.endswith("/metrics"):
            raise ConnectionError("this server counts nothing")
        return self._answer(urllib.request.Request(url))

    @staticmethod
    def _answer(request: urllib.request.Request) -> Response:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return Response(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Response(error.code, error.read().decode())


class LocalClient(VLLMClient):
    """Upstream's client without start-up; weights are copied into the server's model."""

    def __init__(self, url: str, server: CompletionsServer | None = None) -> None:
        self.base_url, self.model, self.session = url, "policy", Session()
        self.server, self.syncs, self.communicator = server, 0, None

    def get_server_info(self) -> dict[str, Any]:
        return {"device_config": {"device": "cpu"}}

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        self._get(f"{self.base_url}/weight_info")

    def update_named_params(self, metadata: Any, named: Any) -> None:
        assert self.server is not None
        weights = {name: tensor.clone() for name, tensor in named}
        assert [name for name, *_ in metadata] == list(weights)
        if isinstance(self.server.sample, ModelSampler):
            self.server.sample.model.load_state_dict(weights)
        self.syncs += 1

    def reset_prefix_cache(self) -> None:
        pass


class ServerGeneration(VLLMGeneration):
    """Upstream's class with a given client in place of its start-up."""

    def __init__(self, client: VLLMClient | None, **options: Any) -> None:
        self._given = client
        super().__init__(mode="server", **options)

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client = self._given


def attach(trainer: PPOTrainer, server: CompletionsServer | None) -> LocalClient | None:
    """Let a trainer that was built without vLLM generate on the server, as with `use_vllm=True`.

    It gets what GRPOTrainer's constructor would have made. On other processes there is no server.
    """
    client = None if server is None else LocalClient(server.url, server)
    for its in (trainer, trainer.args):
        its.use_vllm, its.vllm_mode = True, "server"
    trainer._last_loaded_step = -1
    # Upstream makes none with vLLM.
    del trainer.generation_config, trainer.generation_kwargs
    trainer.vllm_generation = ServerGeneration(
        client, model=trainer.model, accelerator=trainer.accelerator,
        processing_class=trainer.processing_class, temperature=trainer.temperature,
        max_completion_length=trainer.max_completion_length,
    )  # fmt: skip
    url = broadcast_object_list([server and server.url])[0]
    turns = TurnClient(LocalClient(url), trainer.vllm_generation)
    vllm = trainer._player.sampler.vllm
    vllm._client, vllm._generation = turns, trainer.vllm_generation
    return client


@contextmanager
def serving(sample: Sample) -> Iterator[CompletionsServer]:
    server = CompletionsServer(sample)
    try:
        yield server
    finally:
        server.close()

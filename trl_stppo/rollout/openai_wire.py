"""Chat completions in the format of OpenAI's clients, without sockets.

Source: platform.openai.com/docs/api-reference/chat; the package `openai`, 3.54.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..envs.base import decoded_image
from ..errors import MissingPackageError
from . import messages
from .chat import Message
from .contexts import AgentRequest

MODEL = "policy"
# Header with the number of repetitions of a request.
RETRIES = "x-stainless-retry-count"
# Other fields are ignored: they are sampling settings, and only the run's settings give right ratios.
FIELDS = (
    "model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "n",
    "stream", "stream_options", "logprobs", "top_logprobs", "response_format", "functions", "train",
    "user", "metadata", "store",
)  # fmt: skip
# "required" counts as "auto", because a forced call is not a sample of the policy.
CHOICES = ("auto", "none", "required")
# Largest size of a request's body in bytes.
MAX_BODY = 64 * 2**20
POLL_SECONDS = 0.1
# Status and body.
Response = tuple[int, dict[str, Any]]


class RefusedRequest(Exception):
    """Error for a rejected request, in the form of OpenAI's errors."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        error = {"message": message, "type": "invalid_request_error", "code": code}
        self.response: Response = status, {"error": error}


def read_request(body: dict[str, Any]) -> AgentRequest:
    """Convert the body of a chat completion request to an `AgentRequest`.

    Raises:
        RefusedRequest: a field that would falsify what is trained, or that has no meaning here.
    """
    choice, form = body.get("tool_choice") or "auto", body.get("response_format") or {}
    stop, names = body.get("stop") or (), dict[str, str]()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    sizes = [n for n in ("max_tokens", "max_completion_tokens") if body.get(n) is not None]
    refused = {
        name: (type(body[name]) is not int or body[name] < 1) and "give a whole number above 0"
        for name in sizes
    } | {
        "stop": not all(isinstance(text, str) and text for text in stop) and "give texts",
        "train": not isinstance(body.get("train", True), bool) and "give true or false",
        "n": (body.get("n") or 1) > 1 and "make several calls",
        "logprobs": bool(body.get("logprobs")) and "leave it out",
        "response_format": form.get("type", "text") != "text" and "describe the format in a message",
        "tool_choice": choice not in CHOICES and "leave it out",
        "functions": bool(body.get("functions")) and "use `tools`",
        "messages": not body.get("messages") and "give at least one",
    }
    for name, advice in refused.items():
        if advice:
            value = f"={body[name]!r:.80}" if body.get(name) is not None else ""
            raise RefusedRequest(400, f"`{name}{value}` is not supported in a training: {advice}.")
    if body.get("model", MODEL) != MODEL:
        message = f"The model {body['model']!r} does not exist here; allowed is {MODEL!r}."
        raise RefusedRequest(404, message, "model_not_found")
    return AgentRequest(
        [read_message(message, names) for message in body["messages"]],
        body.get("tools") or [],
        stop,
        min((body[name] for name in sizes), default=None),
        reads_tools=choice != "none" and bool(body.get("tools")),
        trains=body.get("train", True),
    )


def read_message(message: dict[str, Any], names: dict[str, str]) -> Message:
    """Convert a client's message to the fields that templates read. `names` maps call ids to tool names."""
    if messages.has_image(message.get("content")):
        message = {**message, "content": [_opened(part) for part in message["content"]]}
    given = messages.read_message(message, names)
    read: Message = {"role": given["role"], "content": given.get("content", "")}
    if given.get("reasoning_content"):
        read["reasoning_content"] = given["reasoning_content"]
    if given["role"] == "tool":
        read["name"] = given.get("name", "tool")
    functions = [call["function"] for call in given.get("tool_calls", ())]
    if functions:
        named = [{key: function[key] for key in ("name", "arguments")} for function in functions]
        read["tool_calls"] = [{"type": "function", "function": function} for function in named]
    return read


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message, with the image of a data URL. No other address is read."""
    if part.get("type") != "image_url":
        return part
    # Some clients give the address alone, as OpenAI's newer API has it.
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not (isinstance(url, str) and url.startswith("data:image/")):
        raise ValueError(f"`image_url` is {url!r:.40}; allowed is `data:image/...;base64,...`")
    return {"type": "image", "image": decoded_image(url.partition(";base64,")[2])}


def completion(name: str, message: Message, finish: str, prompt: int, count: int) -> dict[str, Any]:
    """Make the body of a chat completion: `count` tokens, sampled after `prompt` tokens."""
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    head = {"id": name, "object": "chat.completion", "created": 0, "model": MODEL}
    return {**head, "choices": [choice], "usage": usage}


def answer_message(message: Message, name: str, *, stopped: str | None) -> Message:
    """Convert the policy's turn to OpenAI's form. `stopped` is its text before a stop string, or None."""
    answer: Message = {"role": "assistant", "content": message.get("content") or ""}
    if stopped is not None:
        return answer | {"content": stopped}
    for key in ("reasoning_content", "reasoning", "thinking"):
        if message.get(key):
            answer["reasoning_content"] = message[key]
    for number, call in enumerate(message.get("tool_calls") or []):
        called, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
        function = {"name": called, "arguments": arguments}
        entry = {"id": f"call_{name}_{number}", "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(entry)
        answer["content"] = answer["content"] or None
    return answer


def chunks(whole: dict[str, Any], *, usage: bool) -> Iterator[str]:
    """Yield a completion as the lines of a stream: role, text, calls, end, usage."""
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    (choice,) = whole["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    for number, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": number, **call}]})
    parts = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    parts.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    for part in parts:
        yield f"data: {json.dumps({**head, 'choices': [part]})}\n\n"
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': whole['usage']})}\n\n"
    yield "data: [DONE]\n\n"


class Answers:
    """Answers the HTTP requests of one episode's clients.

    `ask` passes a request to the sampler; `see` reads the images of its messages.
    """

    def __init__(
        self,
        ask: Callable[[AgentRequest], None],
        warn: Callable[[list[str]], None],
        see: Callable[[Any], Any] = lambda messages: messages,
    ) -> None:
        self._ask, self._warn, self._see = ask, warn, see
        self.asked: dict[int, Future[Response]] = {}

    def begin(self, method: str, path: str, content: bytes, headers: Any) -> Future[Response]:
        """Return the future response to a request. A repeated request gets the first response."""
        key = hash((method, path, content))
        if headers.get(RETRIES, "0") != "0" and key in self.asked:
            return self.asked[key]
        try:
            answer = self._answer(method, path, content)
        except RefusedRequest as refused:
            answer = Future()
            answer.set_result(refused.response)
        self.asked[key] = answer
        return answer

    def _answer(self, method: str, path: str, content: bytes) -> Future[Response]:
        if method != "POST" or not path.endswith("/chat/completions"):
            message = f"{method} {path} does not exist here; use POST /v1/chat/completions."
            raise RefusedRequest(404, message)
        try:
            body = json.loads(content)
            request = read_request(body)
            request = replace(request, messages=self._see(request.messages))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RefusedRequest(400, f"The request cannot be read: {error!r}.") from error
        forced = ["tool_choice"] if body.get("tool_choice") == "required" else []
        others = [name for name in body if name not in FIELDS and body[name] is not None]
        self._warn(forced + others)
        self._ask(request)
        return request.answer


def http(response: Response, content: bytes) -> tuple[int, str, bytes]:
    """Return the status, content type and body of the HTTP response to a request with this content."""
    status, body = response
    sent = json.loads(content) if content and status == 200 else {}
    if sent.get("stream"):
        usage = bool((sent.get("stream_options") or {}).get("include_usage"))
        return status, "text/event-stream", "".join(chunks(body, usage=usage)).encode()
    return status, "application/json", json.dumps(body).encode()


def make_clients(answers: Answers, base_url: str, key: str) -> tuple[Any, Any]:
    """Make OpenAI's clients, asynchronous and synchronous, whose requests go to `answers`.

    Their attribute `http_client` is for frameworks that make a client of their own from it.
    """
    try:
        import httpx2
        import openai
    except ImportError as error:
        raise MissingPackageError("openai", "agents") from error

    def begin(request: Any) -> Future[Response]:
        return answers.begin(request.method, request.url.path, request.content, request.headers)

    def made(request: Any, response: Response) -> Any:
        status, kind, body = http(response, request.content)
        return httpx2.Response(status, headers={"content-type": kind}, content=body)

    async def asynchronous(request: Any) -> Any:
        # Shield the answer: if a client gives up on a request, its retry still needs the answer.
        return made(request, await asyncio.shield(asyncio.wrap_future(begin(request))))

    def synchronous(request: Any) -> Any:
        try:
            return made(request, begin(request).result())
        except CancelledError:
            # Raise SystemExit, because `except Exception` in an agent does not catch it.
            raise SystemExit from None

    options: dict[str, Any] = {"api_key": key, "base_url": base_url, "timeout": None}
    session = httpx2.AsyncClient(transport=httpx2.MockTransport(asynchronous), timeout=None)
    blocking = httpx2.Client(transport=httpx2.MockTransport(synchronous), timeout=None)
    clients: list[Any] = [openai.AsyncOpenAI(**options, http_client=session)]
    clients += [openai.OpenAI(**options, http_client=blocking)]
    clients[0].http_client, clients[1].http_client = session, blocking
    return clients[0], clients[1]


class AgentEndpoint:
    """HTTP server that answers requests whose API key is the secret of a running episode."""

    def __init__(self) -> None:
        self._sessions: dict[str, Answers] = {}
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with suppress(ConnectionError):
                    super().handle()

            def do_POST(self) -> None:
                endpoint.handle(self)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                """Suppress the log line of a request."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}/v1"
        serving = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True)
        serving.start()

    def open(self, session: Any) -> None:
        """Accept requests with the secret of an episode."""
        self._sessions[session.key] = session.answers

    def close(self, session: Any) -> None:
        """From now on, reject requests with an episode's secret."""
        self._sessions.pop(session.key, None)

    def stop(self) -> None:
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one HTTP request."""
        headers, content = request.headers, b""
        length = headers.get("Transfer-Encoding") or headers.get("Content-Length") or "0"
        try:
            scheme, _, key = headers.get("Authorization", "").partition(" ")
            answers = self._sessions.get(key)
            if answers is None or scheme != "Bearer":
                raise RefusedRequest(401, "The API key is not that of a running episode.")
            if not length.isdecimal() or int(length) > MAX_BODY:
                raise RefusedRequest(413, f"Content-Length is {length}; allowed: {MAX_BODY}.")
            content = request.rfile.read(int(length))
            response = answers.begin(request.command, request.path, content, headers).result()
        except RefusedRequest as refused:
            # The body is not read, so the connection cannot be used again.
            request.close_connection = True
            response = refused.response
        status, kind, body = http(response, content)
        request.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

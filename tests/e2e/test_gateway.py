"""OpenAI's HTTP API through the gateway `smg`, with clients that nobody here wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_gateway import wait_for_model
from tests.support.processes import Server, free_port

openai = pytest.importorskip("openai", reason="needs the package openai")
pytest.importorskip("smg", reason="needs the extra gateway")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


class Gateway:
    def __init__(self, server: Server, port: int, model: str) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{port}/v1"
        self.model = model
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def chat(self, **fields: Any) -> Any:
        fields = {"model": self.model, "messages": MESSAGES, "max_tokens": 8, **fields}
        return self.client.chat.completions.create(**fields)

    def complete(self, **fields: Any) -> Any:
        fields = {"model": self.model, "prompt": "Once upon", "max_tokens": 8, **fields}
        return self.client.completions.create(**fields)


@pytest.fixture(scope="module")
def gateway(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log, port = tmp_path_factory.mktemp("log") / "serve.log", free_port()
    server = Server(
        log, model=tiny_model, deterministic=True, num_blocks=600, max_requests_per_batch=16,
        served_model_name="tiny", http_port=port,
    )  # fmt: skip
    server.line += ["--gateway", "--", "--tool-call-parser", "json"]
    with server:
        yield Gateway(server, port, wait_for_model(port, log, server.process))


def test_chat_and_completions(gateway: Gateway) -> None:
    """Text, the reason to finish and usage, of both endpoints."""
    chat = gateway.chat(temperature=0)
    assert chat.model == gateway.model
    assert chat.choices[0].finish_reason == "length"
    assert chat.choices[0].message.content
    assert chat.usage.completion_tokens == 8
    assert chat.usage.prompt_tokens > len("Hello")
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 8
    completion = gateway.complete(temperature=0)
    assert completion.choices[0].text
    assert completion.usage.prompt_tokens == len("Once upon")  # a token each byte
    assert gateway.complete(temperature=0).choices[0].text == completion.choices[0].text


def test_streams(gateway: Gateway) -> None:
    """Deltas joined are the whole answer; usage comes last."""
    whole = gateway.chat(temperature=0)
    chunks = list(gateway.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_stop_strings(gateway: Gateway) -> None:
    letters = {str(65 + place): 40.0 for place in range(26)}
    free = gateway.complete(temperature=0, max_tokens=20, logit_bias=letters).choices[0].text
    stop = free[3:5]
    cut = gateway.complete(temperature=0, max_tokens=20, logit_bias=letters, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free[: free.index(stop)]


def test_several_answers_and_seeds(gateway: Gateway) -> None:
    """Each of n answers differs; a seed repeats them."""
    first = gateway.chat(n=3, seed=5, temperature=1.0)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = gateway.chat(n=3, seed=5, temperature=1.0)
    assert [choice.message.content for choice in again.choices] == texts
    other = gateway.chat(n=3, seed=6, temperature=1.0)
    assert [choice.message.content for choice in other.choices] != texts


def test_logprobs(gateway: Gateway) -> None:
    answer = gateway.chat(temperature=0, logprobs=True, top_logprobs=2, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_a_schema_is_followed(gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "sizes": {"type": "boolean"}},
        "required": ["colour", "sizes"],
        "additionalProperties": False,
    }
    answer = gateway.chat(
        temperature=1.0,
        seed=1,
        max_tokens=200,
        logit_bias={str(ord(character) - ord("!")): 90.0 for character in '"]}'},  # to an end
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    thing = json.loads(answer.choices[0].message.content)
    assert thing.keys() == {"colour", "sizes"}
    assert thing["colour"] in ("red", "green")


def test_a_tool_call_is_parsed_from_the_answer(gateway: Gateway) -> None:
    """The model's answer is text in the form that the parser of the gateway knows."""
    call = r'\{"name": "get_weather", "parameters": \{"city": "(Paris|Rome)"\}\}'
    answer = gateway.chat(
        tools=[WEATHER], max_tokens=100, temperature=1.0, seed=2, extra_body={"regex": call}
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    assert json.loads(made.function.arguments)["city"] in ("Paris", "Rome")


def test_a_tool_call_is_forced(gateway: Gateway) -> None:
    """The gateway turns tool_choice into a grammar."""
    answer = gateway.chat(
        tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0,
        logit_bias={str(ord(character) - ord("!")): 90.0 for character in '"]}'},  # to an end
    )  # fmt: skip
    assert answer.choices[0].message.tool_calls, answer
    (made, *_) = answer.choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    assert json.loads(made.function.arguments)["city"] in ("Paris", "Rome")


def test_errors_say_what_is_allowed(gateway: Gateway) -> None:
    """Chairlift's sentence reaches the client."""
    with pytest.raises(openai.BadRequestError, match="max_tokens is 100000; allowed: at most"):
        gateway.complete(max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        gateway.complete(model="another")
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        gateway.chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            }
        )
    assert gateway.complete().choices[0].text


def test_curl_reads_server_sent_events(gateway: Gateway) -> None:
    body = {"model": gateway.model, "prompt": "Once", "max_tokens": 5, "stream": True}
    done = subprocess.run(
        [
            *("curl", "-sN", f"{gateway.url}/completions", "-H", "content-type: application/json"),
            *("-d", json.dumps(body)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_llm_prompts_the_model(gateway: Gateway, tmp_path: Path) -> None:
    """The command-line client `llm`, which streams."""
    pytest.importorskip("llm", reason="needs the package llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: {gateway.model}\n  api_base: {gateway.url}\n"
    )
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "llm", "prompt", "-m", "tiny", "--no-log"),
            *("-o", "max_tokens", "6", "-o", "temperature", "0", "--key", "none", "Hello"),
        ],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = gateway.chat(temperature=0, max_tokens=6).choices[0].message.content
    assert done.stdout.removesuffix("\n") == expected


def test_the_gateway_takes_all_down(tiny_model: Path, tmp_path: Path) -> None:
    """Nobody is served by what is left."""
    port = free_port()
    server = Server(tmp_path / "log", model=tiny_model, num_blocks=64, http_port=port)
    server.line += ["--gateway"]
    server.__enter__()
    wait_for_model(port, server.log, server.process)
    os.kill(server.gateway(), signal.SIGKILL)
    assert server.process.wait(60) == 128 + signal.SIGKILL
    assert "the gateway ended (by SIGKILL); stopping the scheduler" in server.log.read_text()

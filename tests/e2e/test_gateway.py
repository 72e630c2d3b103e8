"""The official OpenAI client, and others, against `chairlift serve --gateway`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.openai_http import MISSING, NEEDS, wait_for_models
from tests.support.processes import Server, free_port

pytestmark = pytest.mark.skipif(bool(MISSING), reason=NEEDS)

MODEL = "qwen2.5-tiny"  # the gateway chooses a tool parser by the model's name
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def http_port(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Server(
        log,
        flags=["--gateway", "--http-port", str(port)],
        model=tiny_model,
        served_model_name=MODEL,
        deterministic=True,
        num_blocks=600,
        max_requests_per_batch=24,
    ) as server:
        assert wait_for_models(port) == MODEL, server.log.read_text()
        yield port


@pytest.fixture(scope="module")
def client(http_port: int) -> Iterator[Any]:
    import openai

    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def chat(client: Any, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0, "messages": MESSAGES, **options}
    return client.chat.completions.create(model=MODEL, **options)


def complete(client: Any, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0, "prompt": "abc", **options}
    return client.completions.create(model=MODEL, **options)


def test_chat_and_usage(client: Any) -> None:
    """The template, the counts or the end of an answer get lost on the way."""
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    prompt = "<s>user: Hi\n<s>assistant:"  # one token per byte or special token
    num_prompt = len(prompt) - 2 * (len("<s>") - 1)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 12)
    assert answer.usage.total_tokens == num_prompt + 12


def test_a_stream_is_the_same_answer(client: Any) -> None:
    """Chunks that repeat, lose or count tokens twice."""
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert sum(bool(delta.delta.content) for delta in deltas) > 1
    assert "".join(delta.delta.content or "" for delta in deltas) == (
        whole.choices[0].message.content
    )
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_completions(client: Any) -> None:
    """The older API, whole, streamed and for several prompts."""
    whole = complete(client)
    assert whole.choices[0].text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12)
    streamed = complete(client, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    several = complete(client, prompt=["abc", "xyz"])
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == whole.choices[0].text != several.choices[1].text


def test_stop_ends_before_the_string(client: Any) -> None:
    """A stop string that is delivered, or not seen."""
    text = chat(client, max_tokens=40).choices[0].message.content
    letter = next(char for char in text[2:] if char.isascii() and char.isprintable())
    for stream in (False, True):
        answer = chat(client, max_tokens=40, stop=[letter], stream=stream)
        if stream:
            choices = [chunk.choices[0] for chunk in answer if chunk.choices]
            said = "".join(choice.delta.content or "" for choice in choices)
            reason = choices[-1].finish_reason
        else:
            said, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert said == text.partition(letter)[0]
        assert reason == "stop"


def test_n_and_seed(client: Any) -> None:
    """Siblings that are mixed up, or a seed that is not passed on."""
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 24}
    first, again, other = (chat(client, **{**options, "seed": seed}) for seed in (7, 7, 8))
    texts = [[choice.message.content for choice in one.choices] for one in (first, again, other)]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts[0])) == 3
    assert texts[0] == texts[1] != texts[2]
    streamed = ["", "", ""]
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts[0]


def test_logprobs(client: Any, tiny_model: Path) -> None:
    """Log probabilities without their tokens, or of others."""
    (choice,) = chat(client, logprobs=True, top_logprobs=3, max_tokens=3).choices
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy
        assert entry.token == entry.top_logprobs[0].token


def test_json_schema(client: Any) -> None:
    """A schema that the gateway or the service drops."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=form, temperature=1, seed=seed, max_tokens=200)
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)


def test_a_tool_call_that_is_demanded(client: Any) -> None:
    """The gateway demands it by a schema, and parses what was generated."""
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat(client, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_tool_call_in_the_models_own_format(client: Any) -> None:
    """The answer of a model that was shown the tools by its template, spelled as Qwen's models do:
    the text must reach the parser whole, and its special words as text."""
    said = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'
    options = {"tools": [WEATHER], "max_tokens": 200, "extra_body": {"regex": said}}
    (call,) = chat(client, **options).choices[0].message.tool_calls
    expected = ("weather", {"city": "Oslo"})
    assert (call.function.name, json.loads(call.function.arguments)) == expected
    name, arguments = "", ""
    for chunk in chat(client, **options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, json.loads(arguments)) == expected


def test_errors_name_what_was_wrong(client: Any) -> None:
    """An error that becomes a 500, an empty answer or a hang."""
    import openai

    with pytest.raises(openai.BadRequestError, match="max_tokens is 8000; allowed: at most"):
        chat(client, max_tokens=8000)
    with pytest.raises(openai.BadRequestError, match="context length"):
        chat(client, messages=[{"role": "user", "content": "x" * 2000}])
    with pytest.raises(openai.BadRequestError, match="regex"):
        chat(client, extra_body={"regex": "(("})
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert chat(client, max_tokens=1).usage.completion_tokens == 1


def test_what_the_gateway_does_not_pass_on(client: Any) -> None:
    """README says so: this fails when a newer gateway passes it on."""
    import openai

    biased = chat(client, logit_bias={"65": 100.0}, max_tokens=4)
    assert (
        biased.choices[0].message.content == chat(client, max_tokens=4).choices[0].message.content
    )
    assert complete(client, logprobs=2).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="prompt"):
        complete(client, prompt=[65, 66, 67])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_reads_server_sent_events(http_port: int) -> None:
    """Events that only one library can read."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "stream": True}
    done = subprocess.run(
        [
            *("curl", "-sSN", "--fail", "--max-time", "60"),
            *("-H", "Content-Type: application/json", "-d", json.dumps(body)),
            f"http://127.0.0.1:{http_port}/v1/chat/completions",
        ],
        capture_output=True,
        check=True,
        timeout=90,
    )
    events = [line for line in done.stdout.decode().splitlines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="needs the package llm")
def test_the_llm_program(http_port: int, tmp_path: Path) -> None:
    """A program that knows nothing but OpenAI's API and an address."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: {MODEL}\n  api_base: http://127.0.0.1:{http_port}/v1\n"
    )
    environment = {
        **os.environ,
        "LLM_USER_PATH": str(tmp_path),
        "LLM_LOAD_PLUGINS": "",
        "OPENAI_API_KEY": "none",
    }
    line = ["-m", "llm", "-m", "tiny", "-o", "max_tokens", "8", "-o", "temperature", "0", "Hi"]
    answers = [
        subprocess.run(
            [sys.executable, *line, *more],
            capture_output=True,
            check=False,
            timeout=90,
            env=environment,
        )
        for more in ([], ["--no-stream"])
    ]
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert answers[0].stdout == answers[1].stdout != b""

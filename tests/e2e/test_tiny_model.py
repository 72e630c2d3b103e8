"""Client, scheduler, worker: the whole path with a tiny random model."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from client import AsyncChairlift, Chairlift, InvalidRequest, cli
from tests.support.oracle import generate
from tests.support.processes import Server


def mixed_requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 200 tokens, 1 to 40 tokens asked for."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for i in range(count):
        length = int(torch.randint(1, 200 if i % 4 == 0 else 30, (1,), generator=generator))
        prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
        requests.append((prompt, 1 + (i * 7) % 40))
    return requests


async def all_at_once(address: str, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    async with AsyncChairlift(address) as chairlift:
        answers = await asyncio.gather(
            *[
                chairlift.complete(prompt, temperature=0, max_tokens=count, ignore_eos=True)
                for prompt, count in requests
            ]
        )
    return [list(answer.token_ids) for answer in answers]


def test_64_at_once_equal_alone_and_generate(tiny_server: Server, tiny_model: Path) -> None:
    """Batching, chunking or paging changes an answer."""
    requests = mixed_requests(64)
    together = asyncio.run(all_at_once(tiny_server.address, requests))
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    for (prompt, count), got in zip(requests, together, strict=True):
        assert got == generate(model, prompt, count)
    with Chairlift(tiny_server.address) as chairlift:
        for (prompt, count), got in list(zip(requests, together, strict=True))[::4]:
            alone = chairlift.complete(prompt, temperature=0, max_tokens=count, ignore_eos=True)
            assert list(alone.token_ids) == got


def test_a_seed_gives_the_same_tokens_alone_and_in_company(tiny_server: Server) -> None:
    """Sampling depends on who else is in the batch."""

    async def run(company: int) -> tuple[int, ...]:
        async with AsyncChairlift(tiny_server.address) as chairlift:
            answers = await asyncio.gather(
                chairlift.complete(
                    [1, 2, 3],
                    temperature=0.9,
                    top_p=0.95,
                    top_k=50,
                    seed=7,
                    max_tokens=24,
                    ignore_eos=True,
                ),
                *[
                    chairlift.complete([i, 5], temperature=1.2, max_tokens=30, ignore_eos=True)
                    for i in range(company)
                ],
            )
        return tuple(answers[0].token_ids)

    assert asyncio.run(run(0)) == asyncio.run(run(12))


def test_text_chat_and_stop_strings(tiny_server: Server) -> None:
    """Text goes in or comes out differently from its tokens."""
    with Chairlift(tiny_server.address) as chairlift:
        prompt = "héllo"
        assert chairlift.detokenize(chairlift.tokenize(prompt)) == prompt
        stream = chairlift.generate(prompt, temperature=0, max_tokens=30, ignore_eos=True)
        deltas = list(stream)
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert len(deltas) > 3, "it does not stream"
        assert text == chairlift.detokenize(tokens)
        whole = chairlift.complete(prompt, temperature=0, max_tokens=30, ignore_eos=True)
        assert (whole.text, list(whole.token_ids)) == (text, tokens)
        assert whole.usage.completion_tokens == 30
        assert whole.finish_reason == "length"

        stop = text[3:5]
        stopped = chairlift.complete(
            prompt, temperature=0, max_tokens=30, ignore_eos=True, stop=[stop]
        )
        assert stopped.text == text[: text.index(stop)]
        assert stopped.finish_reason == "stop"
        chat = [{"role": "user", "content": "hi"}]
        assert chairlift.complete(chat, max_tokens=3, ignore_eos=True).usage.prompt_tokens == (
            len(chairlift.tokenize("<s>user: hi\n<s>assistant:", add_special_tokens=False))
        )


CLIENT = """
import sys
from client import Chairlift
for delta in Chairlift(sys.argv[1]).generate([1, 2, 3] * 30, request_id="victim", max_tokens=400,
                                             temperature=0, ignore_eos=True):
    print(len(delta.token_ids), flush=True)
"""


def test_a_killed_client_frees_its_blocks_within_two_steps(tiny_server: Server) -> None:
    """Blocks of clients that went away fill the pool."""
    with Chairlift(tiny_server.address) as chairlift:
        survivor = chairlift.generate([9], request_id="survivor", max_tokens=500, ignore_eos=True)
        reader = threading.Thread(target=lambda: list(survivor))
        reader.start()
        victim = subprocess.Popen(
            [sys.executable, "-c", CLIENT, tiny_server.address], stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        for _ in range(5):
            assert victim.stdout.readline()
        assert blocks_of(chairlift, "victim") > 5
        victim.kill()
        # the survivor's tokens count the steps; the victim held more than 5 blocks
        gone_at = None
        for _ in wait_at_most(10):
            live = {request.request_id for request in chairlift.list_requests().requests}
            tokens = chairlift.get_request("survivor").summary.computed_tokens
            owned = chairlift.get_cache().groups[0].blocks_owned
            if "victim" in live:
                continue
            gone_at = tokens if gone_at is None else gone_at
            if owned < -(-tokens // 16) + 5:
                break
            assert tokens - gone_at <= 2, "two steps later its blocks are still owned"
        survivor.cancel()
        reader.join()
        victim.wait()
        victim.stdout.close()
        for _ in wait_at_most(10):
            cache = chairlift.get_cache()
            if cache.groups[0].blocks_owned == 0:
                break
        assert cache.chunks_free == cache.chunks_total


def blocks_of(chairlift: Chairlift, request_id: str) -> int:
    return len(chairlift.get_request(request_id).block_tables[0].blocks)


def wait_at_most(seconds: float) -> itertools.count[int]:
    """Turns for polling; runs out with an error."""
    deadline = time.monotonic() + seconds

    def turns():  # type: ignore[no-untyped-def]
        while time.monotonic() < deadline:
            yield
            time.sleep(0.002)
        raise AssertionError(f"it did not happen within {seconds} s")

    return turns()


def test_a_worker_killed_mid_stream_is_only_a_pause(tiny_server: Server) -> None:
    """A crash of the worker loses, doubles or changes tokens of a running answer."""
    with Chairlift(tiny_server.address) as chairlift:
        options = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}
        undisturbed = chairlift.complete([5, 6, 7], **options)
        stream = chairlift.generate([5, 6, 7], **options)
        tokens = list(next(stream).token_ids)
        tiny_server.kill_worker()
        for delta in stream:
            tokens += delta.token_ids
        assert tokens == list(undisturbed.token_ids)
        assert stream.finish_reason == "length"


def test_what_never_fits_is_refused_with_both_numbers(tiny_server: Server) -> None:
    """It would wait for ever."""
    with (
        Chairlift(tiny_server.address) as chairlift,
        pytest.raises(InvalidRequest, match=r"max_tokens is 200.*at most 112.*400 tokens.*512"),
    ):
        chairlift.complete([1] * 400, max_tokens=200)


def test_the_readme_example_runs(tiny_server: Server) -> None:
    """The first program that anybody copies does not work."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0]
    assert "localhost:50051" in program
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:50051", tiny_server.address)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "temperature is -1" in done.stdout


def test_a_batch_file(tiny_server: Server, tmp_path: Path) -> None:
    """Requests in OpenAI's shape do not mean here what they mean there."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    bodies = {
        "chat": {"messages": [message], "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        "json": {
            "messages": [message],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
            },
            "max_tokens": 100,
        },
        "text": {"prompt": "Once", "max_tokens": 3, "temperature": 0, "logprobs": 1},
        "wrong": {"prompt": "Once", "temperature": -1},
    }
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with requests.open("w") as file:
        for name, body in bodies.items():
            url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            print(json.dumps({"custom_id": name, "url": url, "body": body}), file=file)
    assert cli.main(["batch", str(requests), str(results), "--address", tiny_server.address]) == 1
    answers = {
        line["custom_id"]: line for line in map(json.loads, results.read_text().splitlines())
    }
    assert answers.keys() == bodies.keys()
    assert "sampling.temperature is -1" in answers["wrong"]["error"]["message"]
    del answers["wrong"]
    choices = {name: line["response"]["body"]["choices"][0] for name, line in answers.items()}
    assert json.loads(choices["json"]["message"]["content"])["a"] in (1, 2)
    content = choices["chat"]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    logprobs = choices["text"]["logprobs"]
    (most_probable,) = logprobs["top_logprobs"][0].items()
    assert most_probable == (logprobs["tokens"][0], logprobs["token_logprobs"][0])


def test_the_scheduler_process_has_no_torch(tiny_server: Server) -> None:
    """Half a gigabyte and seconds of start-up in a process that computes nothing."""
    maps = Path(f"/proc/{tiny_server.child('scheduler_svc')}/maps").read_text()
    assert "libzmq" in maps or "zmq" in maps
    assert "libtorch" not in maps

"""The real grpcurl program against the real server: what an operator types."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from protos import admin_pb2, inference_pb2
from tests.support.grpcurl import grpcurl, messages
from tests.support.processes import Server


def test_list_shows_the_services(tiny_server: Server) -> None:
    """Reflection is what makes grpcurl work without proto files."""
    assert grpcurl(tiny_server.address, "list").split() == [
        "chairlift.v1.Admin",
        "chairlift.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "vllm.grpc.engine.VllmEngine",
    ]
    assert "rpc Generate" in grpcurl(tiny_server.address, "describe", "chairlift.v1.Inference")


def test_generate_streams_tokens_and_ends_in_a_complete(tiny_server: Server) -> None:
    """The first thing that anybody tries."""
    request = {
        "text": "Once upon a time",
        "sampling": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
    }
    answers = messages(
        grpcurl("-d", json.dumps(request), tiny_server.address, "chairlift.v1.Inference/Generate")
    )
    assert "started" in answers[0]
    chunks = [answer["chunk"] for answer in answers if "chunk" in answer]
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == 16
    complete = answers[-1]["complete"]
    assert complete["finish_reason"] == "length"
    assert complete["usage"] == {"prompt_tokens": 16, "completion_tokens": 16}


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_bad_value_is_named(tiny_server: Server, sampling: dict[str, Any], named: str) -> None:
    """'invalid request' sends the user to the source code."""
    output = grpcurl(
        "-d",
        json.dumps({"text": "x", "sampling": sampling}),
        tiny_server.address,
        "chairlift.v1.Inference/Generate",
        code=64 + 3,
    )
    assert "InvalidArgument" in output
    assert named in output


def test_health_and_admin(tiny_server: Server) -> None:
    """What an operator asks at 3 a.m."""
    health = grpcurl(
        "-d",
        '{"service": "chairlift.v1.Inference"}',
        tiny_server.address,
        "grpc.health.v1.Health/Check",
    )
    assert json.loads(health) == {"status": "SERVING"}
    cache = json.loads(grpcurl(tiny_server.address, "chairlift.v1.Admin/GetCache"))
    assert cache["chunks_free"] == cache["chunks_total"] == 600
    assert grpcurl(tiny_server.address, "chairlift.v1.Admin/ListRequests").split() == ["{", "}"]
    assert "blocks_flushed" in grpcurl(tiny_server.address, "chairlift.v1.Admin/FlushCache")
    output = grpcurl(tiny_server.address, "chairlift.v1.Admin/Pause", code=64 + 12)
    assert "Unimplemented" in output


README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
EXAMPLES = [
    shlex.split(command)[2:]  # without "grpcurl -plaintext"
    for command in re.findall(
        r"^grpcurl -plaintext .*?(?=^\S|\Z)", BLOCKS, re.DOTALL | re.MULTILINE
    )
]
UNSUPPORTED = {"Pause", "Resume", "Drain", "StartProfile", "StopProfile", "SetLogLevel"}
CODES = {"GetRequest": 64 + 5, "WatchSteps": 64 + 4}  # no such request; the end of -max-time


def test_the_readme_calls_every_method() -> None:
    """What it does not show, nobody finds."""
    named = {argument for example in EXAMPLES for argument in example if "/" in argument}
    ours = {
        f"{service.full_name}/{method.name}"
        for service in (
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            admin_pb2.DESCRIPTOR.services_by_name["Admin"],
        )
        for method in service.methods
        if method.name not in UNSUPPORTED
    }
    assert ours <= named
    assert all(f"`{name}`" in README for name in UNSUPPORTED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[-1])
def test_the_examples_of_the_readme_work(tiny_server: Server, example: list[str]) -> None:
    """They are the first calls that a newcomer copies."""
    arguments = [argument.replace("localhost:50051", tiny_server.address) for argument in example]
    if "-max-time" in arguments:
        arguments[arguments.index("-max-time") + 1] = "1"
    output = grpcurl(*arguments, code=CODES.get(example[-1].rpartition("/")[2], 0))
    assert "UNIMPLEMENTED" not in output.upper()

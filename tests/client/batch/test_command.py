"""`chairlift batch` from file to file, against the fake server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client import cli
from tests.client.test_cli import COMMAND, ROOT
from tests.support.fake_server import FakeEngine


def write(path: Path, bodies: dict[str, dict[str, Any]]) -> None:
    """A batch file: texts go to /v1/completions, messages to /v1/chat/completions."""
    with path.open("w") as file:
        for custom_id, body in bodies.items():
            url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
            print(json.dumps(line), file=file)


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines), "a request has two results"
    return results


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def batch(files: tuple[Path, Path], address: str, *flags: str) -> int:
    return cli.main(["batch", *map(str, files), "--address", address, *flags])


def test_answers_in_openais_shape(
    files: tuple[Path, Path], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What scripts that were written for OpenAI's batches read."""
    messages = [{"role": "user", "content": "Hi"}]
    write(
        files[0], {"c": {"messages": messages, "model": "gpt"}, "t": {"prompt": "count 2", "n": 2}}
    )
    assert batch(files, address) == 0
    results = read(files[1])
    chat, text = results["c"]["response"], results["t"]["response"]
    assert (results["c"]["error"], chat["status_code"], bool(chat["request_id"])) == (
        None,
        200,
        True,
    )
    assert chat["body"]["object"] == "chat.completion"
    assert chat["body"]["model"] == "fake-model"
    assert chat["body"]["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "you said: Hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert chat["body"]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert text["body"]["object"] == "text_completion"
    assert [choice["text"] for choice in text["body"]["choices"]] == ["w0 w1 ", "(1)w0 (1)w1 "]
    assert text["body"]["usage"]["completion_tokens"] == 4
    assert "2 answered (6 tokens), 0 failed" in capsys.readouterr().err


def test_logprobs_are_texts(files: tuple[Path, Path], address: str) -> None:
    """OpenAI's shape has no token ids."""
    messages = [{"role": "user", "content": "count 2"}]
    write(
        files[0],
        {
            "c": {"messages": messages, "logprobs": True, "top_logprobs": 1},
            "t": {"prompt": "count 2", "logprobs": 1},
        },
    )
    assert batch(files, address) == 0
    results = read(files[1])
    (chat,) = results["c"]["response"]["body"]["choices"]
    first = {"token": "\x00", "logprob": -0.5, "bytes": [0]}
    assert chat["logprobs"]["content"][0] == {**first, "top_logprobs": [first]}
    (text,) = results["t"]["response"]["body"]["choices"]
    assert text["logprobs"] == {
        "tokens": ["\x00", "\x01"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"\x00": -0.5}, {"\x01": -0.5}],
        "text_offset": [0, 1],
    }


def test_errors_are_results(
    files: tuple[Path, Path], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by one, by name, and told by the exit code; `--retry-failed` asks for them again."""
    write(
        files[0],
        {
            "bad": {"prompt": "count 1", "temprature": 1},
            "refused": {"prompt": "fail INVALID_ARGUMENT top_k is -1"},
            "broken": {"prompt": "fail INTERNAL no luck"},
            "good": {"prompt": "count 1"},
        },
    )
    assert batch(files, address) == 1
    results = read(files[1])
    assert "temprature is no known field" in results["bad"]["error"]["message"]
    assert results["bad"]["error"]["code"] == "INVALID_ARGUMENT"
    assert results["bad"]["response"]["status_code"] == 400
    assert results["refused"]["error"]["message"] == "top_k is -1"
    assert results["broken"]["response"]["status_code"] == 500
    assert results["broken"]["response"]["body"]["error"]["message"] == "no luck"
    assert results["good"]["error"] is None
    assert batch(files, address) == 1, "the failures are still there"
    assert "0 answered (0 tokens), 3 failed, 4 done before" in capsys.readouterr().err
    write(files[0], {custom_id: {"prompt": "count 1"} for custom_id in results})
    assert batch(files, address, "--retry-failed") == 0
    assert all(line["error"] is None for line in read(files[1]).values())


def test_it_goes_on_where_it_stopped(
    files: tuple[Path, Path], address: str, engine: FakeEngine
) -> None:
    """Answers that were paid for are not computed again; half a line is."""
    bodies = {str(number): {"prompt": "count 1"} for number in range(5)}
    write(files[0], bodies)
    assert batch(files, address) == 0
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:2]) + lines[2][:30])
    engine.requests.clear()
    assert batch(files, address, "--concurrency", "2") == 0
    assert len(engine.requests) == 3
    assert read(files[1]).keys() == bodies.keys()
    assert files[1].read_bytes().startswith(b"".join(lines[:2]))


def test_ctrl_c_leaves_a_file_to_go_on_with(
    files: tuple[Path, Path], address: str, engine: FakeEngine
) -> None:
    """The everyday way to stop a long run."""
    write(files[0], {"a": {"prompt": "count 1"}, "b": {"prompt": "silent"}})
    line = [*COMMAND, "batch", *map(str, files), "--address", address]
    with subprocess.Popen(
        line, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        for _ in range(2):
            engine.arrived.get(timeout=30)
        while not files[1].exists() or not files[1].read_bytes().endswith(b"\n"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted; 1 answered (1 tokens), 0 failed, 1 left; run it again" in err
    assert "Traceback" not in err
    assert engine.gone.get(timeout=10)
    assert read(files[1]).keys() == {"a"}
    write(files[0], {"a": {"prompt": "silent"}, "b": {"prompt": "count 1"}})
    assert batch(files, address) == 0
    assert read(files[1]).keys() == {"a", "b"}


def test_a_server_that_is_lost_is_no_result(
    files: tuple[Path, Path],
    address: str,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Recorded as errors, all requests that are left would count as done."""
    write(files[0], {"a": {"prompt": "count 1"}, "b": {"prompt": "count 1"}})
    engine.losses = [None, 0]
    assert batch(files, address, "--concurrency", "1", "--retries", "0") == 1
    err = capsys.readouterr().err
    assert "the server is restarting" in err
    assert "1 answered (1 tokens), 0 failed, 1 left; run it again to go on" in err
    assert read(files[1]).keys() == {"a"}
    assert batch(files, address) == 0
    assert read(files[1]).keys() == {"a", "b"}


def test_wrong_files(
    files: tuple[Path, Path], nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is sent, with file and line."""
    assert batch(files, nobody) == 1
    assert f"{files[0]}: No such file or directory" in capsys.readouterr().err
    files[0].write_text('{"custom_id": "a"}\n{"custom_id": "a"}\n')
    assert batch(files, nobody) == 2
    assert "line 2: custom_id 'a' is already that of line 1" in capsys.readouterr().err
    assert not files[1].exists()
    write(files[0], {"a": {"prompt": "x"}})
    assert batch(files, nobody) == 1
    assert f"no Chairlift server answers at {nobody}" in capsys.readouterr().err


def test_an_empty_batch_is_done(files: tuple[Path, Path], nobody: str) -> None:
    """Nothing to do is no failure, and needs no server."""
    files[0].write_text("")
    assert batch(files, nobody) == 0
    assert files[1].read_text() == ""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_progress(files: tuple[Path, Path], address: str, kind: str) -> None:
    """A bar on a terminal; in a log, no line for each request."""
    write(files[0], {str(number): {"prompt": "count 2"} for number in range(20)})
    line = ["batch", *map(str, files), "--address", address]
    if kind == "terminal":
        from tests.client.test_terminal import on_terminal

        shown = on_terminal(*line)
        assert "20/20" in shown
        assert "40 tokens" in shown
    else:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "client", *line],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert (done.stdout, done.stderr) == ("", "chairlift: 20 answered (40 tokens), 0 failed\n")

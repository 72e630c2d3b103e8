"""The commands as a person or a script uses them, against the fake server."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import cli
from client.processes import launch
from tests.support.fake_server import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-P", "-m", "client"]


def chairlift(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """One command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


class Typed(io.StringIO):
    """Standard input that comes from a keyboard."""

    def isatty(self) -> bool:
        return True


def test_one_prompt_is_plain_text(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What goes into a pipe must be the answer and nothing else."""
    assert cli.main(["generate", "count 3", "--address", address]) == 0
    assert capsys.readouterr() == ("w0 w1 w2 \n", "")


def test_several_prompts_never_share_a_line(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Side by side means that one can still tell who said what."""
    assert cli.main(["generate", "count 60", "count 40", "--address", address]) == 0
    out, _ = capsys.readouterr()
    for lane, count in (("1", 60), ("2", 40)):
        mine = [line for line in out.splitlines() if line.startswith(f"[{lane}] ")]
        assert mine[0] == f"[{lane}] > count {count}"
        assert mine[-1] == f"[{lane}] (stop, {count} tokens)"
        words = " ".join(line.removeprefix(f"[{lane}] ") for line in mine[1:-1]).split()
        assert words == [f"w{number}" for number in range(count)]
        assert max(map(len, mine)) <= 92
    assert all(line[:4] in ("[1] ", "[2] ") for line in out.splitlines())


def test_siblings_have_lanes_of_their_own(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--n 2` is two answers, and shows as two."""
    assert cli.main(["generate", "count 2", "--n", "3", "--address", address]) == 0
    out, _ = capsys.readouterr()
    for lane, text in (("1.1", "w0 w1"), ("1.2", "(1)w0 (1)w1"), ("1.3", "(2)w0 (2)w1")):
        mine = [line for line in out.splitlines() if line.startswith(f"[{lane}] ")]
        assert mine == [f"[{lane}] > count 2", f"[{lane}] {text}", f"[{lane}] (stop, 2 tokens)"]


def test_json_of_siblings(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that asks for three answers finds three objects, and can tell them apart."""
    arguments = ["generate", "count 1", "--n", "3", "--json", "--address", address]
    assert cli.main(arguments) == 0
    answers = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [(answer["index"], answer["text"]) for answer in answers] == [
        (0, "w0 "), (1, "(1)w0 "), (2, "(2)w0 "),
    ]  # fmt: skip


def test_a_conversation_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """`chat --n 3` would mix three answers into one line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--n", "3"])
    assert ended.value.code == 2
    assert "--n" in capsys.readouterr().err


def test_options_reach_the_server(address: str, engine: FakeEngine) -> None:
    """A flag that is accepted and dropped is worse than none."""
    flags = "--temperature 0 --top-k 5 --max-tokens 9 --seed 3 --stop A --stop B --ignore-eos"
    arguments = ["generate", "count 1", *flags.split(), "--priority", "-2", "--cache-salt", "s"]
    assert cli.main([*arguments, "--address", address]) == 0
    (request,) = engine.requests
    sent = request.sampling
    assert (sent.temperature, sent.top_k, sent.max_tokens, sent.seed) == (0, 5, 9, 3)
    assert list(sent.stop) == ["A", "B"]
    assert sent.ignore_eos
    assert (request.priority, request.cache_salt) == (-2, "s")
    assert not sent.HasField("top_p")


def test_constraints_and_penalties_reach_the_server(
    address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    """Each flag of the API's newer fields; a schema may be in a file."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    flags = (
        "--min-tokens 2 --repetition-penalty 1.1 --frequency-penalty 0.5 --presence-penalty -0.5 "
        f"--speculate 4 --bad-word A --bad-word B --json-schema @{schema} --beam-width 3 --n 2 "
        "--length-penalty 0.5 --logprobs 2 --prompt-logprobs 1 --json"
    )
    assert cli.main(["generate", "count 1", *flags.split(), "--address", address]) == 0
    sent = engine.requests[0].sampling
    assert (sent.min_tokens, sent.speculate, sent.beam_width, sent.n) == (2, 4, 3, 2)
    assert (sent.logprobs, sent.prompt_logprobs, sent.length_penalty) == (2, 1, 0.5)
    assert (sent.frequency_penalty, sent.presence_penalty) == (0.5, -0.5)
    assert sent.repetition_penalty == pytest.approx(1.1)
    assert list(sent.bad_words) == ["A", "B"]
    assert sent.json_schema == '{"type": "object"}'
    for flags, field in (
        ("--choice yes --choice no", "choice"),
        ("--regex a+", "regex"),
        ("--grammar start:", "grammar"),
        ("--json-object", "json_object"),
    ):
        assert cli.main(["generate", "count 1", *flags.split(), "--address", address]) == 0
        assert engine.requests[-1].sampling.WhichOneof("constraint") == field


def test_logprobs_are_printed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, where there is room for them; elsewhere the flag says so."""
    arguments = ["generate", "count 1", "--logprobs", "1", "--address", address]
    assert cli.main([*arguments, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["logprobs"]
    assert entry == {"token_id": 0, "logprob": -0.5, "rank": 1, "top": [[0, -0.5]]}
    beams = ["generate", "rank 1", "--beam-width", "2", "--json", "--address", address]
    assert cli.main(beams) == 0
    assert json.loads(capsys.readouterr().out)["beam_score"] == -1.5
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_chat_prompts(address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Instruction-tuned models answer nonsense unless asked through their template."""
    assert cli.main(["generate", "--system", "Be brief.", "Hi", "--address", address]) == 0
    assert capsys.readouterr().out == "you said: Hi\n"
    messages = engine.requests[0].chat.messages
    assert [message.role for message in messages] == ["system", "user"]


def test_standard_input(
    address: str,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file is one prompt, newlines inside kept; with --lines each line is one."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert cli.main(["generate", "--address", address]) == 0
    assert [request.text for request in engine.requests] == ["one\ntwo"]
    engine.requests.clear()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert cli.main(["generate", "--lines", "-", "--address", address]) == 0
    assert sorted(request.text for request in engine.requests) == ["one", "two"]
    capsys.readouterr()


def test_json_is_one_object_per_answer(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read this; an error is an object too, so that no prompt goes missing."""
    arguments = ["generate", "--json", "count 2", "fail INTERNAL no luck"]
    assert cli.main([*arguments, "--address", address]) == 1
    out, err = capsys.readouterr()
    answers = sorted(map(json.loads, out.splitlines()), key=lambda each: each["prompt_index"])
    assert answers[0]["text"] == "w0 w1 "
    assert answers[0]["usage"]["completion_tokens"] == 2
    assert answers[0]["finish_reason"] == "stop"
    assert answers[1] == {"prompt_index": 1, "error": "no luck", "status": "INTERNAL"}
    assert err == "chairlift: prompt 2: no luck\n"


def test_one_failure_does_not_stop_the_others(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long batch must not be lost to one bad prompt; the exit code still says so."""
    assert cli.main(["generate", "broken INTERNAL no luck", "count 1", "--address", address]) == 1
    out, _ = capsys.readouterr()
    assert "[1] once\n[1] (failed: no luck)\n" in out
    assert "[2] (stop, 1 tokens)" in out


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["status"]])
def test_nobody_there(nobody: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that goes wrong for everybody: one sentence, no traceback."""
    assert cli.main([*command, "--address", nobody]) == 1
    assert f"no Chairlift server answers at {nobody}: start one with" in capsys.readouterr().err


def test_wrong_usage_names_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a sentence, before anything is sent."""
    monkeypatch.setattr(sys, "stdin", Typed())
    for arguments, sentence in (
        (["generate"], "PROMPT is missing; allowed: text, or - for standard input"),
        (["generate", "-", "-"], "- is given twice"),
        (["generate", "x", "--lines"], "--lines applies to standard input"),
        (["generate", "x", "--concurrency", "0"], "--concurrency is 0; allowed: at least 1"),
        (["generate", "x", "--retries", "-1"], "-1 is not an integer of at least 0"),
        (["generate", "x", "--json-schema", "@/none"], "/none: No such file or directory"),
        (["generate", "x", "--regex", "a", "--choice", "b"], "regex and choice are both given"),
        ([], "COMMAND"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err


def test_ctrl_c_cancels_what_runs(address: str, engine: FakeEngine) -> None:
    """Otherwise the server goes on writing for somebody who has left."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "forever", "--address", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"once"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b""
    assert out.endswith(b"\n")
    assert engine.gone.get(timeout=10)


def test_a_reader_that_leaves_ends_it_quietly(address: str, engine: FakeEngine) -> None:
    """`| head -1` is everyday use, and no reason for a traceback."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "forever", "--address", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 141
    assert engine.gone.get(timeout=10)


def test_panels_leave_whole_texts_behind(address: str) -> None:
    """On a terminal the live view goes; the answers must stay, whole and in order."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "generate", "count 50", "count 2", "--address", address],
        stdout=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(theirs)
        shown = b"".join(read_terminal(ours)).decode()
    assert process.returncode == 0
    end = shown[shown.rindex("[1] count 50") :]
    assert "w0 w1 w2" in end
    assert "w49" in end
    assert end.index("(stop, 50 tokens)") < end.index("[2] count 2") < end.index("(stop, 2 tokens)")


def read_terminal(descriptor: int) -> Iterator[bytes]:
    """All output until the other side closes (Linux reports that as an error)."""
    try:
        while data := os.read(descriptor, 4096):
            yield data
    except OSError:
        pass
    finally:
        os.close(descriptor)


def test_chat_remembers(address: str, engine: FakeEngine) -> None:
    """The model sees the whole conversation, until /clear."""
    given = "Hello\nAgain\n/clear\nNew\n"
    done = chairlift("chat", "--system", "S", "--address", address, given=given)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "you said: Hello\nyou said: Again\n(new conversation)\nyou said: New\n"
    turns = [[message.content for message in asked.chat.messages] for asked in engine.requests]
    assert turns == [["S", "Hello"], ["S", "Hello", "you said: Hello", "Again"], ["S", "New"]]


def test_ctrl_c_in_chat_stops_the_answer_only(address: str, engine: FakeEngine) -> None:
    """Small models ramble: stopping one answer must not end the conversation."""
    with subprocess.Popen(
        [*COMMAND, "chat", "--address", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("forever\n")
        process.stdin.flush()
        start = "you said: forever0 "
        assert process.stdout.read(len(start)) == start
        process.send_signal(signal.SIGINT)
        assert engine.gone.get(timeout=10)
        out, err = process.communicate("Hello\n", timeout=30)
    assert process.returncode == 0, err
    assert out.endswith(" (stopped)\nyou said: Hello\n")
    remembered = engine.requests[1].chat.messages[1]
    assert (remembered.role, remembered.content[: len(start)]) == ("assistant", start)


def test_status_at_a_glance(
    address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an operator looks at first; the exit code tells a script."""
    assert cli.main(["status", "--address", address]) == 0
    assert capsys.readouterr().out == (
        f"Chairlift 0.1.0 at {address}: ready, up 1 h 2 min\n"
        "worker    ready on cpu\n"
        "model     fake-model (FakeForCausalLM, float32), up to 2048 tokens per request\n"
        "requests  2 running, 1 waiting\n"
        "cache     25 of 100 chunks in use (25%) of 100 MiB, pages 97% full; page_size 16\n"
        "prefixes  25% of 200 prompt tokens found; 40 free blocks still cached\n"
        "drafts    75% of 80 guessed tokens accepted\n"
        "swap      2 of 8 chunks in use (25%)\n"
        "preempted 7 times: 3 offloads (2 restored), 4 soft resets\n"
        "\n"
        "request   state                prompt  output  age\n"
        "first     DECODING             5       9/64    0 s\n"
        "first[1]  PENDING (offloaded)  5       7/64    0 s\n"
    )
    engine.is_ready = False
    assert cli.main(["status", "--json", "--address", address]) == 1
    assert json.loads(capsys.readouterr().out)["server"]["worker"] == "loading"
    engine.error = "tokenizer.json is empty"
    assert cli.main(["status", "--address", address]) == 1
    assert "\nerror     tokenizer.json is empty\n" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Both work without a server and without any extra."""
    for flag, expected in (("--version", "chairlift "), ("--help", "serve")):
        with pytest.raises(SystemExit) as ended:
            cli.main([flag])
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "scheduler", "worker"])
def test_a_missing_extra_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pip install chairlift` gives the client only: say what to install for the rest."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert cli.main([command]) == 1
    part = "scheduler" if command == "serve" else command
    assert f"pip install 'chairlift[{part}]'" in capsys.readouterr().err


def test_scheduler_becomes_the_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd watches the process that it started: a child would not be it."""
    seen: list[list[str]] = []
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch.os, "execv", lambda path, line: seen.append(line))
    cli.main(["scheduler", "--port", "0", "--help"])
    assert seen == [[sys.executable, "-P", "-m", "scheduler_svc", "--port", "0", "--help"]]

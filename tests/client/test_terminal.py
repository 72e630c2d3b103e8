"""Odd bytes, odd numbers and odd locales at the command line; no escape sequence on a terminal."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from client import cli
from client.terminal.streams import escape_controls
from tests.client.test_cli import read_terminal
from tests.support.fake_server import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\b\rend"
SEPARATORS = "a\x0bb\x0cc\x1cd\x85e\u2028f\rg"


def chairlift(
    *arguments: str | bytes, given: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """One command in a process of its own, its input and output as bytes."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "client", *arguments],
        input=given,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def on_terminal(*arguments: str, typed: bytes = b"") -> str:
    """All that a command shows on a terminal, errors too."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "client", *arguments],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "120"},
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.close()
        return b"".join(read_terminal(ours)).decode()


def test_control_characters_are_spelled_out() -> None:
    """A model's text could retitle the window or fill the clipboard of who reads it."""
    shown = escape_controls(HOSTILE)
    assert shown == (
        r"\u001b]0;title\u0007\u001b[2J\u009b31m\u007f\u0008\u000dend"
    )  # the forms that JSON knows
    assert escape_controls("naïve 😀\ttab\nline\u2028") == "naïve 😀\ttab\nline\u2028"
    assert escape_controls("\u202eevil\u2066x") == r"\u202eevil\u2066x"  # they reorder the text


@pytest.mark.parametrize("cut", range(len(HOSTILE) + 1))
def test_no_sequence_comes_together_from_two_deltas(cut: int) -> None:
    """A stream may end a delta within one."""
    parts = escape_controls(HOSTILE[:cut]) + escape_controls(HOSTILE[cut:])
    assert parts == escape_controls(HOSTILE)
    assert parts.isprintable()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--chat", HOSTILE],
        ["generate", "--chat", HOSTILE, "second"],  # panels, or lines where rich is missing
        ["generate", "--chat", HOSTILE, *(str(number) for number in range(15))],  # lines
        ["generate", "--chat", "--json", HOSTILE],
        ["generate", f"fail INTERNAL {HOSTILE}"],
        ["chat"],
    ],
    ids=["one", "panels", "lines", "json", "error", "chat"],
)
def test_no_escape_sequence_of_a_model_reaches_a_terminal(
    address: str, arguments: list[str]
) -> None:
    """Each way of showing an answer, and errors, which quote what was sent."""
    shown = on_terminal(*arguments, "--address", address, typed=HOSTILE.encode() + b"\n")
    assert "\x9b" not in shown
    assert "\x07" not in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert r"\u001b]0;title" in shown


def test_a_pipe_gets_the_text_as_it_is(address: str) -> None:
    """What is processed further must not be changed on the way."""
    done = chairlift("generate", "--chat", HOSTILE, "--address", address)
    assert done.stdout.decode() == f"you said: {HOSTILE}\n"


def test_odd_bytes_are_named(address: str, engine: FakeEngine) -> None:
    """A Latin-1 letter in an argument or a file: one line that says so, and nothing is sent."""
    latin, utf16 = "café".encode("latin-1"), "hello".encode("utf-16")
    for done, sentence in (
        (chairlift("generate", latin, "--address", address), b"argument 2: byte 0xe9 after 3"),
        (chairlift("generate", "-", "--address", address, given=latin), b"byte 0xe9 after 3 char"),
        (chairlift("generate", "--address", address, given=utf16), b"byte 0xff after 0 char"),
        (chairlift("generate", "x", "--system", latin), b"argument 4: byte 0xe9"),
    ):
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
        assert sentence in done.stderr
    assert not engine.requests
    done = chairlift("chat", "--address", address, given=latin + b"\nHello\n")
    assert done.stdout == b"you said: Hello\n"
    assert b"this message was not sent: byte 0xe9 after 3 characters" in done.stderr


def test_odd_locales(address: str) -> None:
    """A terminal that cannot show a character shows which one it is; JSON stays JSON."""
    latin = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = chairlift("generate", "--chat", "ï 😀", "--address", address, **latin, given=b"")
    assert done.stderr == b""
    assert done.stdout == "you said: ï \\U0001f600\n".encode("latin-1")
    done = chairlift("generate", "--chat", "--json", "ï 😀", "--address", address, **latin)
    assert rb'"text": "you said: \u00ef \ud83d\ude00"' in done.stdout


def test_a_byte_order_mark_is_no_part_of_a_prompt(address: str, engine: FakeEngine) -> None:
    """Editors of Windows begin every file with one."""
    chairlift("generate", "--address", address, given=b"\xef\xbb\xbfcount 1\n")
    assert [request.text for request in engine.requests] == ["count 1"]


def test_lines_end_at_newlines_only(address: str, engine: FakeEngine) -> None:
    """Other separators are part of a prompt; a file from Windows is the same file."""
    given = f"{SEPARATORS}\r\nsecond\n\nthird".encode()
    done = chairlift("generate", "--lines", "-", "--json", "--address", address, given=given)
    assert done.returncode == 0, done.stderr
    assert sorted(request.text for request in engine.requests) == sorted(
        [SEPARATORS, "second", "third"]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-tokens", "99999999999"], "max_tokens is 99999999999; allowed: an integer from -"),
        (["--seed", str(10**22)], f"seed is {10**22}; allowed: an integer from"),
        (["--top-k", str(2**31)], "top_k is 2147483648; allowed: an integer from -2147483648"),
        (["--priority", str(10**10)], "priority is 10000000000; allowed: an integer from"),
        (["--timeout", "nan"], "nan is not a number of seconds above 0"),
        (["--timeout", "-1"], "-1 is not a number of seconds above 0"),
        (["--timeout", "1e300"], "1e300 is not a number of seconds above 0"),
    ],
)
def test_odd_numbers_are_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that no message can carry: the option, the value and the range, no traceback."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "x", *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    if arguments[0] != "--priority":
        with pytest.raises(SystemExit) as ended:
            cli.main(["chat", *arguments])
        assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "redirection", "code"),
    [
        (["generate", "-"], "<&-", 0),
        (["generate", "count 2"], ">&-", 0),
        (["generate", "count 2", "count 2"], ">&-", 0),
        (["generate", "fail INTERNAL x"], "2>&-", 1),
        (["chat"], "<&-", 0),
        (["status"], "<&- >&- 2>&-", 0),
    ],
)
def test_streams_that_a_caller_has_closed(
    address: str, arguments: list[str], redirection: str, code: int
) -> None:
    """As cron and some supervisors start programs: a closed stream is an empty one."""
    line = shlex.join([sys.executable, "-P", "-m", "client", *arguments, "--address", address])
    done = subprocess.run(
        ["sh", "-c", f"{line} {redirection}"],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert b"Traceback" not in done.stderr
    assert done.returncode == code, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["status"], ["generate", "count 2"]])
def test_a_full_disk_is_named(address: str, arguments: list[str]) -> None:
    """What cannot be written is told in one line, and the exit code says so."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "client", *arguments, "--address", address],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.stderr == b"chairlift: No space left on device\n"
    assert done.returncode == 1

"""`chairlift chat` at a terminal, as a person uses it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.conversation import Conversation
from tests.client.test_terminal import HOSTILE, chairlift
from tests.support.fake_server import FakeEngine
from tests.support.terminal import Terminal

pytest.importorskip("prompt_toolkit", reason="needs prompt_toolkit, of the extra cli")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def chat(address: str, state: Path) -> Iterator[Terminal]:
    with Terminal("chat", "--address", address, XDG_STATE_HOME=str(state)) as terminal:
        terminal.expect("/help lists commands")
        terminal.expect("\n>")
        yield terminal


def asked(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    """Role and content of all messages, for each request."""
    return [[(m.role, m.content) for m in request.chat.messages] for request in engine.requests]


def test_an_answer_and_its_usage(chat: Terminal) -> None:
    """And the end by Ctrl-D."""
    chat.type("Hello\r")
    chat.expect("you said: Hello")
    chat.expect("(stop, 3 prompt tokens (0 cached), 2 tokens, 2.0 per second)")
    chat.expect("\n>")
    chat.type("\x04")
    assert chat.end() == 0


def test_several_lines(chat: Terminal, engine: FakeEngine) -> None:
    """By Alt-Enter, by a backslash, and as one paste; Enter sends."""
    chat.type("one\x1b\rtwo\\\rthree")
    chat.paste("\nfour\nfive")
    chat.type("\r")
    chat.expect("you said: ")
    chat.expect("(stop")
    assert asked(engine) == [[("user", "one\ntwo\nthree\nfour\nfive")]]


def test_editing_and_history(address: str, state: Path, engine: FakeEngine) -> None:
    """Up brings back what was said in this session and in the one before."""
    for number, typed in enumerate(("first\r", "\x1b[A again\x01The \r")):
        with Terminal("chat", "--address", address, XDG_STATE_HOME=str(state)) as terminal:
            terminal.expect("\n>")
            terminal.type(typed)
            terminal.expect("(stop")
            terminal.expect("\n>")  # a terminal that is not read yet takes Ctrl-D for its own
            terminal.type("\x04")
            assert terminal.end() == 0
            assert len(engine.requests) == number + 1
    assert asked(engine)[1] == [("user", "The first again")]
    history = state / "chairlift" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0, "others may read it"
    with Terminal(
        "chat", "--no-history", "--address", address, XDG_STATE_HOME=str(state)
    ) as terminal:
        before = history.read_bytes()
        terminal.expect("\n>")
        terminal.type("secret\r")
        terminal.expect("(stop")
    assert history.read_bytes() == before


def test_ctrl_c(chat: Terminal, engine: FakeEngine) -> None:
    """Stops the answer, which stays in the conversation as far as it came, and not the program."""
    chat.type("half a line\x03")
    chat.expect("(Ctrl-D leaves)")
    chat.type("forever\r")
    chat.expect("forever0 1 2 ")
    chat.interrupt()
    chat.expect("(stopped)")
    assert engine.gone.get(timeout=10)
    chat.expect("\n>")
    chat.type("Go on\r")
    chat.expect("you said: Go on")
    question, answer, last = asked(engine)[1]
    assert (question, last) == (("user", "forever"), ("user", "Go on"))
    assert answer[0] == "assistant"
    assert answer[1].startswith("you said: forever0 1 2 ")


def test_commands(address: str, tmp_path: Path, engine: FakeEngine) -> None:
    """What each does to the conversation that the model sees."""
    saved = tmp_path / "talk.json"
    given = (
        "/undo\n/retry\n/system\nA\n/system Be brief.\nB\n/undo\nC\n/retry\n"
        f"/save {saved}\n/save {saved}\n/clear\n/system -\nD\n/nonsense\n /help me\n/help\n"
    )
    done = chairlift("chat", "--seed", "5", "--address", address, given=given.encode())
    a = [("user", "A"), ("assistant", "you said: A")]
    brief = ("system", "Be brief.")
    assert asked(engine) == [
        [("user", "A")],
        [brief, *a, ("user", "B")],
        [brief, *a, ("user", "C")],
        [brief, *a, ("user", "C")],
        [("user", "D")],
        [("user", "D"), ("assistant", "you said: D"), ("user", "/help me")],
    ]
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [5, 5, 5, 6, 5, 5], "the same seed gives the same answer again"
    said = done.stdout.decode().splitlines()
    for line in (
        "(nothing to undo)",
        "(nothing to ask again)",
        "(no system message)",
        "(system message: Be brief.)",
        "(removed: B)",
        "(again: C)",
        f"(saved to {saved})",
        "(new conversation)",
    ):
        assert line in said
    assert any(line.startswith("/save [FILE]") for line in said)
    assert any(line.startswith("Ctrl-C") for line in said)
    errors = done.stderr.decode()
    assert "unknown command /nonsense; allowed: /system, /retry" in errors
    assert f"{saved}: File exists" in errors
    assert json.loads(saved.read_text()) == [
        {"role": role, "content": content}
        for role, content in [brief, *a, ("user", "C"), ("assistant", "you said: C")]
    ]


def test_an_error_leaves_the_conversation_as_it_was(address: str, engine: FakeEngine) -> None:
    """Neither a question without an answer nor, after /retry, no answer at all."""
    engine.losses, engine.loss = [None, 0, 2], "INTERNAL no luck"
    done = chairlift("chat", "--address", address, given=b"A\n/retry\nB\nC\n")
    a = [("user", "A"), ("assistant", "you said: A")]
    assert asked(engine)[3] == [*a, ("user", "C")]
    assert done.stderr.decode().count("no luck") == 2


def test_lines_that_go_on_without_a_terminal(address: str, engine: FakeEngine) -> None:
    """A script may send several lines as one message, too."""
    chairlift("chat", "--address", address, given=b"one\\\ntwo\nthree\\")
    assert [messages[-1][1] for messages in asked(engine)] == ["one\ntwo", "three"]


def test_no_sequence_of_the_model_reaches_the_terminal(chat: Terminal) -> None:
    """Also where the terminal is one that prompt_toolkit writes sequences to."""
    chat.paste(HOSTILE.replace("\r", ""))
    chat.type("\r")
    chat.expect(r"you said: \u001b]0;title\u0007\u001b[2J\u009b31m")
    assert "\x1b]0;" not in chat.raw
    assert "\x07" not in chat.raw
    assert "\x9b" not in chat.raw


def test_without_prompt_toolkit(address: str, state: Path) -> None:
    """The base install has grpcio and protobuf only: plain lines, and no traceback."""
    block = (
        "import importlib.util as u, sys; real = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'prompt_toolkit' else real(name, *a); "
        "from client.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with Terminal("chat", "--address", address, code=block, XDG_STATE_HOME=str(state)) as terminal:
        terminal.expect("\n>")
        terminal.type("one\\\n")
        terminal.expect("… ")
        terminal.type("two\n")
        terminal.expect("you said: one\ntwo")
        terminal.expect("\n> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert not state.exists()


def test_a_conversation_as_text() -> None:
    """What /save writes for people."""
    talk = Conversation("S", [("Q", "A")])
    assert talk.as_markdown() == "## system\n\nS\n\n## user\n\nQ\n\n## assistant\n\nA\n"


def test_a_home_that_cannot_be_written(address: str, tmp_path: Path) -> None:
    """No history then; the conversation goes on."""
    blocked = tmp_path / "file"
    blocked.touch()
    with Terminal("chat", "--address", address, XDG_STATE_HOME=str(blocked)) as terminal:
        terminal.expect("\n>")
        terminal.type("Hello\r")
        terminal.expect("you said: Hello")


def test_help_names_the_keys(address: str) -> None:
    """`chairlift chat --help` needs no server."""
    done: subprocess.CompletedProcess[bytes] = chairlift("chat", "--help")
    assert b"/help lists commands and keys" in done.stdout
    assert done.returncode == 0

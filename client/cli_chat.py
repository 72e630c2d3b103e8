"""`chairlift chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from client import cli_options, terminal
from client.errors import ChairliftError
from client.requests import ChatMessage, SamplingOptions
from client.stub import Chairlift


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="A conversation: the model is told all that was said before.",
        epilog="Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D leaves.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    cli_options.add_sampling(parser)
    cli_options.add_server(parser)
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    sampling = cli_options.sampling(parser, options)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()

    with Chairlift(options.address, timeout=options.timeout) as chairlift:
        model = chairlift.model_info(timeout=10).model
        if sys.stdin.isatty():
            name = terminal.for_reader(model, sys.stdout)
            print(f"{name} · Ctrl-C stops an answer, /reset forgets, Ctrl-D leaves")
        return _converse(chairlift, options.system, sampling)


def _converse(chairlift: Chairlift, system: str | None, sampling: SamplingOptions) -> int:
    start = [ChatMessage("system", system)] if system is not None else []
    history = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # at the prompt: only the line that was being typed goes
            print("\n(Ctrl-D leaves)")
            continue
        if (reason := terminal.why_not_text(line)) is not None:
            terminal.complain(f"this line was not sent: {reason}")
        elif line == "/reset":
            history = list(start)
            print("(forgotten)")
        elif line:
            history.append(ChatMessage("user", line))
            answer = _answer(chairlift, history, sampling)
            if answer is None:
                history.pop()
            else:
                history.append(ChatMessage("assistant", answer))


def _answer(
    chairlift: Chairlift, history: list[ChatMessage], sampling: SamplingOptions
) -> str | None:
    """Streams the answer; what was shown of it, also when stopped. None if it failed."""
    shown: list[str] = []
    try:
        with chairlift.generate(history, **sampling) as stream:
            for delta in stream:
                shown.append(delta.text)  # first: a Ctrl-C may come right after the print
                print(terminal.for_reader(delta.text, sys.stdout), end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except ChairliftError as error:
        terminal.complain(error)
        return None
    print()
    return "".join(shown)

"""`chairlift chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from client.blocking import Chairlift
from client.chat_messages import ChatMessage
from client.commands.options import add_sampling_options, add_server_options, sampling_options
from client.errors import ChairliftError
from client.messages import GenerateOptions
from client.terminal.streams import print_error, printable, why_not_text


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model; it sees the whole conversation.",
        epilog="Ctrl-C stops an answer, /reset starts a new conversation, Ctrl-D leaves.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser)
    add_server_options(parser)
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    sampling = sampling_options(parser, options)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()

    with Chairlift(options.address, timeout=options.timeout) as chairlift:
        model = chairlift.model_info(timeout=10).model
        if sys.stdin.isatty():
            name = printable(model, sys.stdout)
            print(f"{name} · Ctrl-C stops an answer, /reset starts over, Ctrl-D leaves")
        return _converse(chairlift, options.system, sampling)


def _converse(chairlift: Chairlift, system: str | None, sampling: GenerateOptions) -> int:
    start = [ChatMessage("system", system)] if system is not None else []
    history = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # at the prompt: discards the line being typed
            print("\n(Ctrl-D leaves)")
            continue
        if (reason := why_not_text(line)) is not None:
            print_error(f"this line was not sent: {reason}")
        elif line == "/reset":
            history = list(start)
            print("(new conversation)")
        elif line:
            history.append(ChatMessage("user", line))
            answer = _answer(chairlift, history, sampling)
            if answer is None:
                history.pop()
            else:
                history.append(ChatMessage("assistant", answer))


def _answer(
    chairlift: Chairlift, history: list[ChatMessage], sampling: GenerateOptions
) -> str | None:
    """Streams the answer; returns the part that was shown, also after Ctrl-C. None on an error."""
    shown: list[str] = []
    try:
        with chairlift.generate(history, **sampling) as stream:
            for delta in stream:
                shown.append(delta.text)  # first: Ctrl-C may come right after the print
                print(printable(delta.text, sys.stdout), end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except ChairliftError as error:
        print_error(error)
        return None
    print()
    return "".join(shown)

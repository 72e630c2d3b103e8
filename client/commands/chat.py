"""`chairlift chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from client.aio import AsyncChairlift
from client.answers import Completion
from client.chat_messages import ChatMessage
from client.commands.options import add_sampling_options, add_server_options, sampling_options
from client.conversation import Conversation
from client.errors import ChairliftError
from client.messages import GenerateOptions
from client.terminal.display import shortened
from client.terminal.line_input import LineInput, line_input, state_folder
from client.terminal.streams import print_error, printable, why_not_text

_KEYS: Final = (
    ("Enter", "sends"),
    ("Alt-Enter, or \\ at the end", "begins a new line"),
    ("Up, Down, Ctrl-R", "earlier messages, of other sessions too"),
    ("Ctrl-X Ctrl-E", "opens the message in $EDITOR"),
    ("Ctrl-C", "stops the answer; what has come of it stays in the conversation"),
    ("Ctrl-D", "leaves"),
)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model; it sees the whole conversation.",
        epilog="Ctrl-C stops an answer, /help lists commands and keys, Ctrl-D leaves.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--no-history",
        action="store_true",
        help=f"keep no messages for later sessions (they go to {state_folder()}/chat_history)",
    )
    add_sampling_options(parser)
    add_server_options(parser, has_retries=True)
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    sampling = sampling_options(parser, options)
    history = None if options.no_history else state_folder() / "chat_history"
    # asyncio, because Ctrl-C cancels a task at an await; in the middle of gRPC's blocking calls it
    # may leave the connection locked
    with asyncio.Runner() as runner:
        chairlift = runner.run(_connect(options))
        try:
            model = runner.run(chairlift.model_info(timeout=10)).model
            chat = Chat(runner, chairlift, Conversation(options.system), sampling)
            if sys.stdin.isatty():
                _say(f"{model} · Ctrl-C stops an answer, /help lists commands, Ctrl-D leaves")
            return chat.run(line_input(history, [f"/{name}" for name in chat.commands]))
        finally:
            runner.run(chairlift.close())


async def _connect(options: argparse.Namespace) -> AsyncChairlift:
    return AsyncChairlift(options.address, timeout=options.timeout, retries=options.retries)


class Chat:
    """One session at the terminal. `commands` are by name what is done and how it is described."""

    def __init__(
        self,
        runner: asyncio.Runner,
        chairlift: AsyncChairlift,
        conversation: Conversation,
        sampling: GenerateOptions,
    ) -> None:
        self._runner = runner
        self._chairlift = chairlift
        self._conversation = conversation
        self._sampling = sampling
        self._num_retries = 0  # of the last question
        self.commands: Final[dict[str, tuple[Callable[[str], None], str]]] = {
            "system": (self._set_system, "TEXT  sets the system message; - removes it; shows it"),
            "retry": (self._retry, "asks the last question again"),
            "undo": (self._undo, "removes the last question and its answer"),
            "clear": (self._clear, "begins a new conversation"),
            "save": (self._save, "[FILE]  writes the conversation, as Markdown or .json"),
            "help": (self._help, "lists commands and keys"),
        }

    def run(self, source: LineInput) -> int:
        """Answers until the input ends."""
        while True:
            try:
                message = source.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:  # at the prompt: discards the line being typed
                print("\n(Ctrl-D leaves)")
                continue
            if (reason := why_not_text(message)) is not None:
                print_error(f"this message was not sent: {reason}")
                continue
            command, _, rest = message.partition(" ")
            if command[:1] == "/" and command[1:].isalpha():
                self._obey(command[1:], rest.strip())
            elif message.strip():
                self._num_retries = 0
                self._ask(message.strip())

    def _obey(self, command: str, rest: str) -> None:
        if command in self.commands:
            self.commands[command][0](rest)
        else:
            print_error(
                f"unknown command /{command}; allowed: "
                f"{', '.join(f'/{name}' for name in self.commands)}; "
                "a message that begins with a space is sent as it is"
            )

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
        system = self._conversation.system
        _say("(no system message)" if system is None else f"(system message: {system})")

    def _retry(self, _: str) -> None:
        if not self._conversation.turns:
            _say("(nothing to ask again)")
            return
        question, answer = self._conversation.turns.pop()
        self._num_retries += 1
        _say(f"(again: {shortened(question, 60)})")
        if not self._ask(question):
            self._conversation.turns.append((question, answer))

    def _undo(self, _: str) -> None:
        question = self._conversation.undo()
        _say("(nothing to undo)" if question is None else f"(removed: {shortened(question, 60)})")

    def _clear(self, _: str) -> None:
        self._conversation.turns.clear()
        _say("(new conversation)")

    def _save(self, name: str) -> None:
        path = Path(name or time.strftime("chairlift-chat-%Y-%m-%d-%H%M%S.md")).expanduser()
        is_json = path.suffix == ".json"
        text = self._conversation.as_json() if is_json else self._conversation.as_markdown()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print_error(f"{path}: {error.strerror}")
        else:
            _say(f"(saved to {path})")

    def _help(self, _: str) -> None:
        for name, (_run, effect) in self.commands.items():
            usage, _gap, meaning = effect.rpartition("  ")
            _say(f"{f'/{name} {usage}':28}{meaning}")
        for key, effect in _KEYS:
            _say(f"{key:28}{effect}")

    def _ask(self, question: str) -> bool:
        """Streams the answer and adds the turn; after Ctrl-C, with the part that has come. False if
        nothing has."""
        shown: list[str] = []
        sampling = self._sampling.copy()
        if (seed := sampling.get("seed")) is not None:
            sampling["seed"] = seed + self._num_retries  # the same one would give the same answer
        messages = self._conversation.messages(question)
        try:
            completion = self._runner.run(self._stream(messages, sampling, shown))
        except KeyboardInterrupt:
            print(" (stopped)")
        except ChairliftError as error:
            print("\n" if shown else "", end="")
            print_error(error)
            return False
        else:
            print()
            if sys.stdout.isatty() and completion is not None:
                _say(_summary(completion))
        if shown:
            self._conversation.turns.append((question, "".join(shown)))
        return bool(shown)

    async def _stream(
        self, messages: list[ChatMessage], sampling: GenerateOptions, shown: list[str]
    ) -> Completion | None:
        """Prints the answer as it comes, and adds it to `shown`."""
        async with self._chairlift.generate(messages, **sampling) as stream:
            async for delta in stream:
                shown.append(delta.text)
                print(printable(delta.text, sys.stdout), end="", flush=True)
        return stream.completions.get(0)


def _summary(completion: Completion) -> str:
    usage, seconds = completion.usage, completion.timing.decode_seconds
    parts = [
        completion.finish_reason,
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} tokens",
    ]
    if seconds > 0 and usage.completion_tokens > 1:
        parts.append(f"{(usage.completion_tokens - 1) / seconds:.1f} per second")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} guesses right")
    return f"({', '.join(parts)})"


def _say(text: str) -> None:
    print(printable(text, sys.stdout), flush=True)

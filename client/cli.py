"""The command `chairlift`: its subcommands, and how their errors are reported.

Each subcommand is a file in client/commands, but for `bench`. argparse, because the base install
has nothing else. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from client.bench import command as bench
from client.commands import batch, chat, demo, generate, serve, status
from client.errors import ChairliftError
from client.processes import launch
from client.processes.launch import LaunchError
from client.terminal.streams import discard_output, prepare, print_error, why_not_text

# These pass all their options on to another program, so argparse must not parse them.
_PASS_THROUGH: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "serve": ("start a scheduler and a worker on this machine", serve.main),
    "scheduler": ("run the scheduler process", lambda rest: launch.become("scheduler", rest)),
    "worker": ("run a worker process", lambda rest: launch.become("worker", rest)),
}
_WRONG_USAGE = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare()
    try:
        if given and given[0] in _PASS_THROUGH:
            _, run = _PASS_THROUGH[given[0]]
            return run(given[1:])
        for position, argument in enumerate(given, start=1):
            if (reason := why_not_text(argument)) is not None:
                print_error(f"argument {position}: {reason}")
                return _WRONG_USAGE
        options = build_parser().parse_args(given)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (ChairliftError, LaunchError) as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `chairlift generate … | head`
        discard_output()
        return _BROKEN_PIPE
    except OSError as error:  # a full disk, say
        reason = error.strerror or str(error)
        print_error(reason if error.filename is None else f"{error.filename}: {reason}")
        discard_output()
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="Serve causal language models by continuous batching, and use them.",
        epilog="`chairlift COMMAND --help` shows the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (help_text, _) in _PASS_THROUGH.items():
        commands.add_parser(name, help=help_text, add_help=False)
    for command in (generate, chat, batch, status, bench, demo):
        command.add_parser(commands)
    return parser


def version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "(run from source)"

"""The command `chairlift`: which subcommands there are, and how their errors are shown.

argparse only: the base install has nothing else. Each subcommand is a file of its own; `serve`,
`scheduler` and `worker` run the other packages as child processes, never by import.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from client import cli_chat, cli_generate, cli_status, demo, launch, serve, terminal
from client.bench import command as bench
from client.errors import ChairliftError
from client.launch import LaunchError

# Their options belong to the program that they start, so argparse must not look at them.
_PASS_ON: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "serve": ("start a scheduler and a worker on this machine", serve.main),
    "scheduler": ("become the scheduler process", lambda rest: launch.become("scheduler", rest)),
    "worker": ("become a worker process", lambda rest: launch.become("worker", rest)),
}
_WRONG_USAGE = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    terminal.prepare()
    try:
        if given and given[0] in _PASS_ON:
            _, run = _PASS_ON[given[0]]
            return run(given[1:])
        for position, argument in enumerate(given, start=1):
            if (reason := terminal.why_not_text(argument)) is not None:
                terminal.complain(f"argument {position}: {reason}")
                return _WRONG_USAGE
        options = build_parser().parse_args(given)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (ChairliftError, LaunchError) as error:
        terminal.complain(error)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `chairlift generate … | head`
        terminal.give_up_output()
        return _BROKEN_PIPE
    except OSError as error:  # a full disk, say
        terminal.complain(_without_number(error))
        terminal.give_up_output()
        return 1


def _without_number(error: OSError) -> str:
    """The reason, and the file if there is one."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="Serves causal language models by continuous batching, and talks to them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (help_text, _) in _PASS_ON.items():
        commands.add_parser(name, help=help_text, add_help=False)
    for command in (cli_generate, cli_chat, cli_status, bench, demo):
        command.add_parser(commands)
    return parser


def version() -> str:
    """Of the installed distribution."""
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "(run from source)"

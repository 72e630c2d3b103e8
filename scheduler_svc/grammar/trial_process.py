"""The process in which grammars are tried: `python -m scheduler_svc.grammar.trial_process`.

Compiling a grammar that is made to hurt can take minutes or gigabytes, and a chain of a few
thousand rules overflows the stack, which ends the process. So each trial is a fork of this process
with limits of time, memory and stack: whatever the grammar does ends the fork alone. The vocabulary
is built once, before the first fork.

Standard input is a socket from the scheduler. First comes the setup: its length in 8 bytes, then
JSON. After that each message is one end of a socket pair, over which a trial is held: the grammar
comes in, and a space and JSON go out, null or the reason for refusing it; the space alone if the
fork was killed. The process ends when the socket is closed, as it is when the scheduler dies.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
from pathlib import Path
from typing import NoReturn

from llguidance import LLMatcher, LLTokenizer

from scheduler_svc.grammar.limits import (
    TRIAL_BYTES,
    TRIAL_CPU_SECONDS,
    TRIAL_STACK_BYTES,
    TRIAL_TOKENS,
    parser_limits,
)
from scheduler_svc.grammar.vocabulary import build_tokenizer

MAX_SECONDS = 20.0  # of a trial that waits: its scheduler may have forgotten it


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the scheduler, which ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks need no wait
    control = socket.socket(fileno=os.dup(0))
    length = int.from_bytes(control.recv(8, socket.MSG_WAITALL), "big")
    tokenizer = build_tokenizer(*json.loads(control.recv(length, socket.MSG_WAITALL)))
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as conversation:
            if os.fork() == 0:
                _hold(conversation, tokenizer)


def _hold(conversation: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    """A trial, in a fork."""
    try:
        _limit()
        conversation.sendall(b" ")
        with conversation.makefile("rb") as received:
            grammar = received.read().decode()
        conversation.sendall(json.dumps(why_refused(grammar, tokenizer)).encode())
    finally:
        os._exit(0)


def _limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_SECONDS)  # SIGPROF ends the process
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (TRIAL_STACK_BYTES, TRIAL_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def why_refused(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """Compiles the grammar and follows it for some tokens, always the same ones; None if it does
    no harm."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    draw = random.Random(0).randrange
    for _ in range(TRIAL_TOKENS):
        allowed = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return matcher.get_error()
        if matcher.is_stopped():
            break
        behind = draw(tokenizer.vocab_size)
        rest = allowed >> behind << behind or allowed
        token_id = (rest & -rest).bit_length() - 1
        if token_id in tokenizer.eos_tokens:
            break
        matcher.consume_token(token_id)
    return None


if __name__ == "__main__":
    main()

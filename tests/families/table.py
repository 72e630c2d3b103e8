"""Every causal-LM family of transformers through the worker, and the page that says what came of
it: `python -m tests.families.table` writes docs/models.md, `--only opt` tries single families and
writes nothing.

A family is tried in a process of its own with a time limit, so that none can hang or break another.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

import torch
import transformers

from tests.families.trial import EQUAL, IMPOSSIBLE, REFUSED, WRONG, Outcome, try_family
from tests.support.family_configs import FAMILIES, VARIANTS, WINDOW

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
NAMES: Final = (*FAMILIES, *VARIANTS)
_SECONDS: Final = 120  # of one family
_HEAD: Final = """# Which models are served

Made by `python -m tests.families.table`, with transformers {version}. Do not edit.

Every causal-LM family that this version of transformers maps to a model is tried as a tiny model
with random weights: 8 prompts of 1 to 70 tokens, greedy, alone, batched in chunks and with the
reference attention, against `generate`. **equal**: every token is the same. **refused**: loading
fails with the reason that is given here. **impossible to build**: no tiny model could be made, so
it was not tried; a real one may be served or refused. Windows were {window} tokens where a family
has one.

{summary}

| family | outcome | reason |
|---|---|---|
"""


def outcomes(names: Iterable[str], processes: int = 1) -> Iterator[tuple[str, Outcome]]:
    """Outcomes in the order of completion, each from a process of its own."""
    waiting = list(names)[::-1]
    running: dict[Connection, tuple[str, int]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop()
            receiving, child = _fork(name)
            running[receiving] = (name, child)
        for receiving in wait(list(running)):
            assert isinstance(receiving, Connection)
            name, child = running.pop(receiving)
            yield name, _received(receiving)
            os.waitpid(child, 0)


def _fork(name: str) -> tuple[Connection, int]:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some families print
        os.environ["HF_HUB_OFFLINE"] = "1"
        warnings.simplefilter("ignore")
        logging.disable()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            sending.send(try_family(name, Path(folder), lambda: sending.send(None)))
        os._exit(0)
    sending.close()
    return receiving, child


def _received(receiving: Connection) -> Outcome:
    """`None` says that the model is built; what ends a trial after that is no excuse."""
    is_built = False
    try:
        while True:
            outcome = receiving.recv()
            if outcome is not None:
                return outcome  # type: ignore[no-any-return]
            is_built = True
    except EOFError:
        what = f"its trial dies, or takes longer than {_SECONDS} s"
        return Outcome(WRONG if is_built else IMPOSSIBLE, what)
    finally:
        receiving.close()


def page(found: dict[str, Outcome]) -> str:
    """docs/models.md"""
    counts = {
        result: sum(outcome.result == result for outcome in found.values())
        for result in (EQUAL, REFUSED, IMPOSSIBLE, WRONG)
    }
    return _HEAD.format(
        version=transformers.__version__,
        window=WINDOW,
        summary=", ".join(f"{count} {result}" for result, count in counts.items() if count) + ".",
    ) + "".join(
        f"| {name} | {outcome.result} | {outcome.reason.replace('|', '/')} |\n"
        for name, outcome in sorted(found.items())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="FAMILY")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    told = parser.parse_args()
    found = {}
    for name, outcome in outcomes(told.only or NAMES, told.processes):
        found[name] = outcome
        print(f"{name:24} {outcome.result:20} {outcome.reason}", flush=True)
    if not told.only:
        PAGE.write_text(page(found))
    return any(outcome.result == WRONG for outcome in found.values())


if __name__ == "__main__":
    sys.exit(main())

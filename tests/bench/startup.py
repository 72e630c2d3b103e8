"""From `chairlift serve` to the first token: `python -m tests.bench.startup [--turns 3]`.

Cold: an empty cache folder, so that the embedded model is converted and the C kernels are built.
Warm: the folder that the cold start has left. The times of the log lines separate the phases; a
request is sent as soon as the server listens, as by a script that starts both.

--against FOLDER starts another source tree (the version before a change) in turns with this one and
prints the ratios.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from client import Chairlift, Unavailable
from tests.support.processes import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
# phase → the log line that ends it
PHASES: Final = {
    "listening": r"listening on",
    "worker connected": r"worker on .* connects",
    "kernels, model converted": r"reading the configuration: ",
    "weights read": r"packing weights: |checking the model: ",  # first layer, or none to pack
    "packed": r"checking the model: ",
    "model loaded": r"loaded \S+ in",
    "ready": r"scheduler_svc\.server: ready",
}
FIRST_TOKEN: Final = "first token"
_STAMP: Final = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")
_POLL_SECONDS: Final = 0.01
_START_SECONDS: Final = 300.0


def start(tree: Path, cache: Path, model: str) -> dict[str, float]:
    """Seconds from the start of the processes to each of PHASES and to the first token."""
    port = free_port()
    line = [sys.executable, "-P", "-m", "client", "serve", "--host", "127.0.0.1"]
    line += ["--port", str(port), "--model", model, "--num-blocks", "1000"]
    environment = {**os.environ, "CHAIRLIFT_CACHE_DIR": str(cache), "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile() as log:
        begin = time.time()
        process = subprocess.Popen(line, stdout=log, stderr=log, env=environment, cwd=tree)
        try:
            answered = _first_token(port, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
        if answered is None:
            raise SystemExit(
                "\n".join([*lines[-20:], "the server did not start; its log is above"])
            )
    return {**_phases(lines, begin), FIRST_TOKEN: answered - begin}


def _first_token(port: int, process: subprocess.Popen[bytes]) -> float | None:
    """The time of the first token; None if the server ends before it."""
    with Chairlift(f"127.0.0.1:{port}") as chairlift:
        while process.poll() is None:
            try:
                stream = chairlift.generate("Hello", max_tokens=1, timeout=_START_SECONDS)
                next(stream)
            except Unavailable:  # not listening yet
                time.sleep(_POLL_SECONDS)
            else:
                return time.time()
    return None


def _phases(lines: list[str], begin: float) -> dict[str, float]:
    """The time of the first matching line of each phase; phases without one are omitted."""
    found: dict[str, float] = {}
    for line in lines:
        stamp = _STAMP.match(line)
        if stamp is None:
            continue
        for phase, pattern in PHASES.items():
            if phase not in found and re.search(pattern, line):
                moment = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found[phase] = moment - begin
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.startup")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--against", type=Path, help="another source tree, started in turns")
    parser.add_argument("--warm-only", action="store_true", help="omit the cold starts")
    options = parser.parse_args()
    trees = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    starts = {(kind, name): [] for kind in ("cold", "warm") for name in trees}
    with tempfile.TemporaryDirectory(prefix="chairlift-startup-") as folder:
        for turn in range(options.turns + options.warm_only):
            for name, tree in trees.items():
                cache = Path(folder, name if options.warm_only else f"{name}-{turn}")
                for kind in ("cold", "warm"):
                    if options.warm_only and (kind == "cold") == cache.exists():
                        continue  # the first turn only fills the cache
                    found = start(tree, cache, options.model)
                    starts[kind, name].append(found)
                    print(
                        f"{kind}, {name}: {found[FIRST_TOKEN]:.1f} s", file=sys.stderr, flush=True
                    )
    print(table(starts))


def table(starts: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """Medians of the end of each phase, in seconds since the start; ratios by turn."""
    columns = {column: found for column, found in starts.items() if found}
    lines = [" " * 26 + "".join(f"{kind + ', ' + name:>14}" for kind, name in columns)]
    for phase in (*PHASES, FIRST_TOKEN):
        ends = [[one[phase] for one in found if phase in one] for found in columns.values()]
        cells = "".join(f"{statistics.median(end):>14.2f}" if end else " " * 14 for end in ends)
        lines.append(f"{phase:26}{cells}")
    for kind in ("cold", "warm"):
        pairs = zip(starts[kind, "this"], starts.get((kind, "other"), []), strict=False)
        ratios = [this[FIRST_TOKEN] / other[FIRST_TOKEN] for this, other in pairs]
        if ratios:
            lines.append(
                f"{kind}: this takes {statistics.median(ratios):.2f} times as long as the other"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""`python -P -m tests.support.serving_process`: `serve` as a process, with a fake engine.

Answers every request with one "x" and then says no more, so that a test decides how it ends.
Prints its port once it listens.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from scheduler_svc.front import server
from scheduler_svc.settings.config_sources import load_config
from tests.support.fake_engine import FakeEngine
from tests.support.small_tokenizers import chat


class StartsReady(FakeEngine):
    def start(self, on_crash: Any = None) -> None:
        super().start(on_crash)
        self.become_ready()


def main() -> None:
    logging.basicConfig(level="INFO", stream=sys.stderr)
    config = load_config(sys.argv[1:], {})
    load = lambda path: server.Tokenizer(chat())  # noqa: E731
    engine: Any = StartsReady()
    engine.script = lambda engine, submission: engine.speak(submission.new.request_id, [87])
    asyncio.run(server.serve(config, engine, load_tokenizer=load))


if __name__ == "__main__":
    main()

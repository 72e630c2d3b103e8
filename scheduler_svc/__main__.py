"""The scheduler process: `python -P -m scheduler_svc`. The only place that wires its parts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from scheduler_svc.config import ConfigError
from scheduler_svc.config_sources import load_config
from scheduler_svc.core import views
from scheduler_svc.engine import Engine
from scheduler_svc.server import CannotListen, serve
from scheduler_svc.worker_link import WorkerLink


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after a clean stop, 2 when it could not start as it was told to."""
    try:
        config = load_config(sys.argv[1:] if arguments is None else arguments, os.environ)
    except ConfigError as error:
        print(f"chairlift scheduler: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    link = WorkerLink(config.worker_address)
    try:
        asyncio.run(
            serve(
                config,
                lambda deliver, on_status: Engine(config, link, deliver, on_status),
                views,
            )
        )
    except CannotListen as error:
        print(f"chairlift scheduler: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

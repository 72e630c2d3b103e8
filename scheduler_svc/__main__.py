"""The scheduler process: `python -P -m scheduler_svc`. Builds its parts and connects them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scheduler_svc.core.limits import Limits
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.worker_link import WorkerLink
from scheduler_svc.front.server import CannotListen, EngineCrashed, ModelRefused, serve
from scheduler_svc.settings.config import Config, ConfigError, prepare_worker_address
from scheduler_svc.settings.config_sources import load_config
from scheduler_svc.settings.descriptors import raise_limit
from scheduler_svc.settings.kubernetes import note_service_links

logger = logging.getLogger(__name__)

# Python's default of 5 ms is half a step: each time the engine, for which the worker waits, had
# released the GIL, it would wait that long for the thread that writes to clients. An interval
# shorter than a turn of either thread would make both lose their caches in the middle of one.
SWITCH_SECONDS: Final = 0.002


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a clean stop, 1 after a crash, 2 where a restart would fail again."""
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_limit()
    try:
        config = load_config(sys.argv[1:] if arguments is None else arguments, os.environ)
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        note_service_links(os.environ)
        prepare_worker_address(config.worker_address)
        asyncio.run(serve(config, make_engine(config)))
    except (ConfigError, CannotListen, ModelRefused) as error:
        print(f"chairlift scheduler: {error}", file=sys.stderr)
        return 2
    except EngineCrashed as error:
        print(f"chairlift scheduler: {error}; see the log", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the signal handlers are installed
        return 130
    except Exception as error:
        logger.critical("the scheduler crashed", exc_info=True)
        print(f"chairlift scheduler: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def make_engine(config: Config) -> Engine:
    policy = POLICIES[config.scheduler_type]
    margin = policy.safety_margin if config.safety_margin is None else config.safety_margin
    return Engine(
        Limits(
            max_batch_tokens=config.max_batch_tokens,
            max_requests_per_batch=config.max_requests_per_batch,
            cache_budget=config.cache_budget,
            safety_margin=margin,
            max_plans_in_flight=2 if config.use_async_batching else 1,
            allow_block_sharing=config.allow_block_sharing,
            target_step_ms=config.target_step_ms,
        ),
        config.to_configure(),
        WorkerLink(config.worker_address, secrets.randbits(63) | 1, *curve_keys(config)),
        policy=policy,
        max_queue_size=config.max_queue_size,
        heartbeat_timeout=config.heartbeat_timeout,
        step_timeout=config.step_timeout,
    )


def curve_keys(config: Config) -> tuple[Path | None, Path | None]:
    """The scheduler's secret key file and the folder with its workers' public keys, from the
    environment; (None, None) for a plain ipc:// link. A tcp:// address needs them: anyone who can
    reach the port could read every prompt."""
    own = os.environ.get("CHAIRLIFT_CURVE_KEY_FILE")
    workers = os.environ.get("CHAIRLIFT_CURVE_CLIENT_KEYS")
    if bool(own) != bool(workers):
        raise ConfigError(
            "CHAIRLIFT_CURVE_CLIENT_KEYS" if own else "CHAIRLIFT_CURVE_KEY_FILE",
            None,
            "environment",
            "both a secret key file and a folder of workers' public keys, or neither",
        )
    if own and workers:
        return Path(own), Path(workers)
    if config.worker_address.startswith("tcp://"):
        raise ConfigError(
            "worker_address",
            config.worker_address,
            "",
            "ipc://PATH; or tcp:// with CHAIRLIFT_CURVE_KEY_FILE and CHAIRLIFT_CURVE_CLIENT_KEYS",
        )
    return None, None


if __name__ == "__main__":
    sys.exit(main())

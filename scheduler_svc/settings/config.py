"""The settings of the scheduler process: one flat, frozen value, checked once.

Sources in order of precedence: command line (`--max-batch-tokens 512`), environment
(`CHAIRLIFT_MAX_BATCH_TOKENS=512`), TOML file (`max_batch_tokens = 512`; `--config FILE` or
CHAIRLIFT_CONFIG), default. A wrong or unknown key is an error that names key, value, source and
what is allowed.

Owns keys, defaults, limits and help texts. config_sources.py reads the sources. A worker has no
settings of its own; it receives `to_configure`.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from protos import link_pb2
from protos.link import HEARTBEAT_SECONDS
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.step_time import TARGET_STEP_MS

MAX_IPC_PATH_BYTES: Final = 107  # of a Unix socket's address
MIN_HEARTBEATS: Final = 4  # missing ones before a worker may count as dead
_MAX_COUNT: Final = (1 << 31) - 1

# Integers sent to the worker must fit their fields of the Configure message.
_MAXIMA: Final = {
    spec.name: {
        FieldDescriptor.CPPTYPE_INT32: _MAX_COUNT,
        FieldDescriptor.CPPTYPE_INT64: (1 << 63) - 1,
    }.get(spec.cpp_type)
    for spec in link_pb2.Configure.DESCRIPTOR.fields
}


class ConfigError(ValueError):
    """A setting that cannot be used; `str()` names key, value, source and what is allowed."""

    def __init__(self, key: str, value: object, source: str, allowed: str) -> None:
        where = f" ({source})" if source else ""
        super().__init__(f"{key} is {value!r}{where}; allowed: {allowed}")
        self.key = key


class UnknownKey(ConfigError):
    def __init__(self, key: str, value: object, source: str, known: Iterable[str]) -> None:
        known = list(known)
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        ValueError.__init__(
            self,
            f"unknown setting {key} ({source}, value {value!r}).{hint} Allowed: {', '.join(known)}",
        )
        self.key = key


class Rule(NamedTuple):
    """The help text and the allowed values of a key."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    why: str = ""  # reason for the bounds


def setting(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(help, **limits)})


def default_worker_address() -> str:
    """A socket in a folder owned by this user (`prepare_worker_address` creates it)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = f"chairlift-{os.getuid()}"
    folders = [Path(runtime) / "chairlift"] if runtime else []
    folders += [Path(tempfile.gettempdir()) / own, Path("/tmp") / own]
    addresses = [f"ipc://{folder}/worker.ipc" for folder in folders]
    return next(filter(_fits, addresses))  # a cluster's TMPDIR may be too long


def _fits(address: str) -> bool:
    """Whether an ipc:// address is short enough for a Unix socket."""
    return len(os.fsencode(address.removeprefix("ipc://"))) <= MAX_IPC_PATH_BYTES


def prepare_worker_address(address: str) -> None:
    """Creates the folder of an ipc socket, closed to other users. Raises ConfigError."""
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return
    folder = Path(path).parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise ConfigError(
            "worker_address", address, str(error), "a socket in a folder that can be created"
        ) from None
    if address == default_worker_address() and owner != os.getuid():
        raise ConfigError(
            "worker_address",
            address,
            f"{folder} belongs to another user",
            "a socket in a folder owned by this user",
        )


@dataclass(frozen=True, slots=True)
class Config:
    # What is served
    model: str = setting(
        "smollm2-135m-instruct", "model to serve: an alias, a local folder or a Hub id"
    )
    served_model_name: str = setting("", "name that clients see; empty = the value of model")
    device: str = setting("auto", "where the worker runs: auto, cpu, cuda, cuda:N or mps")
    dtype: str = setting(
        "auto",
        "of weights and arithmetic; auto = the checkpoint's on CUDA, float32 on CPU",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "of stored keys and values; auto = dtype, but float16 where weight_format is int8",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    weight_format: str = setting(
        "float32",
        "how linear layers' weights are packed on the CPU; unpacked = as torch has them",
        choices=("float32", "float16", "int8", "unpacked"),
    )
    attention: str = setting(
        "auto",
        "attention backend; auto = the fastest that the device has",
        choices=("auto", "reference", "cpu", "triton"),
    )
    deterministic: bool = setting(
        False, "same bits whatever the batch (dense float32 models on CPU); costs speed"
    )
    max_model_len: int = setting(
        0, "prompt + output tokens of one request; 0 = the model's own limit", minimum=0
    )
    num_threads: int = setting(
        0, "CPU threads of the worker; 0 = torch's choice", minimum=0, maximum=4096
    )

    # The batch
    scheduler_type: str = setting(
        "fifo",
        "order of requests; static = padded batches, for comparison only",
        choices=tuple(POLICIES),
    )
    max_batch_tokens: int = setting(
        2048,
        "tokens of one step; 2048 of prefill saturate a GPU, yet keep the step short for decoding "
        "requests; at least max_requests_per_batch",
        minimum=1,
        maximum=1 << 24,
    )
    target_step_ms: float | None = setting(
        None,
        "target for the duration of a step in milliseconds while other requests are decoding; "
        "prompts are split to meet it; 0 = no target, unset = by device ("
        + ", ".join(f"{device} {aim:g}" for device, aim in TARGET_STEP_MS.items())
        + ")",
        minimum=0.0,
        maximum=3_600_000.0,
    )
    max_requests_per_batch: int = setting(
        64,
        "requests of one step, at most max_batch_tokens; if only one of the two is set, the "
        "default of the other is adjusted",
        minimum=1,
        maximum=1 << 16,
    )
    cache_budget: int = setting(
        0,
        "KV pages read in one step, shared ones once; 0 = no limit",
        minimum=0,
        maximum=_MAX_COUNT,
    )
    safety_margin: float | None = setting(
        None,
        "share of the pool below which new prefills wait; unset = by policy ("
        + ", ".join(f"{policy.name} {policy.safety_margin:g}" for policy in POLICIES.values())
        + ")",
        minimum=0.0,
        maximum=0.99,
    )

    # KV memory
    page_size: int = setting(16, "tokens of one page", minimum=1, maximum=1 << 16)
    num_blocks: int = setting(
        0,
        "whole-model blocks of page_size tokens; 0 = as many as memory allows",
        minimum=0,
        maximum=_MAX_COUNT,
    )
    max_memory_percent: float = setting(
        0.0,
        "share of device memory to use, as a fraction; 0 = by device (0.9 on CUDA, 0.6 of "
        "available memory on CPU)",
        minimum=0.0,
        maximum=1.0,
    )
    allow_block_sharing: bool = setting(
        True, "prefix cache: requests with a common prefix and the same cache_salt share its KV"
    )
    cpu_offload_space: float = setting(
        0.0,
        "GiB of host memory for swapping KV when the pool is full; 0 = recompute it instead",
        minimum=0.0,
        maximum=float(1 << 20),
    )

    # How the worker executes
    use_cuda_graph: bool = setting(
        True, "replay steps as CUDA graphs where the device and the model allow it"
    )
    use_async_batching: bool = setting(
        True,
        "plan the next step while one runs, so that the worker does not wait; false = one plan at "
        "a time, with the same tokens",
    )
    q_padding_interval_size: int = setting(
        8, "rows between two decode graphs, up to 64 rows; larger graphs are wider apart", minimum=1
    )
    kv_padding_interval_size: int = setting(
        64,
        "no effect: block tables are ragged, so their width is not padded",
        minimum=1,
        maximum=(1 << 31) - 1,
    )

    # The service
    host: str = setting("0.0.0.0", "address to listen on; 127.0.0.1 = this machine only")
    port: int = setting(
        50051, "port to listen on; 0 = any free one (see the log)", minimum=0, maximum=65535
    )
    worker_address: str = setting("", "ipc:// or tcp:// address for workers; empty = a private ipc")
    max_queue_size: int = setting(
        0,
        "requests that may wait for a row before new ones are refused; 0 = no limit",
        minimum=0,
        maximum=_MAX_COUNT,
    )
    request_timeout: float = setting(
        0.0, "seconds after which a request ends DEADLINE_EXCEEDED; 0 = never", minimum=0.0
    )
    worker_wait: float = setting(
        0.0,
        "seconds a request waits for the first worker to be ready, then UNAVAILABLE; 0 = forever",
        minimum=0.0,
    )
    heartbeat_timeout: float = setting(
        10.0,
        "seconds without a heartbeat after which a worker counts as dead",
        minimum=MIN_HEARTBEATS * HEARTBEAT_SECONDS,
        why=f"a worker sends one every {HEARTBEAT_SECONDS:g} s, and a busy machine delays some",
    )
    step_timeout: float = setting(
        300.0,
        "seconds without progress of a step after which the worker's session ends, and the worker "
        "exits to be restarted; 0 = never",
        minimum=0.0,
    )
    exit_on_model_error: bool = setting(
        False,
        "exit with code 2 when the model cannot be served, as chairlift serve does; false = "
        "answer UNAVAILABLE with the reason until a worker can serve it",
    )
    drain_grace: float = setting(
        30.0, "seconds for running streams to end after SIGTERM", minimum=0.0
    )
    max_message_bytes: int = setting(
        64 << 20,
        "largest gRPC message in either direction; requests are limited to 16 MiB anyway",
        minimum=1024,
        maximum=_MAX_COUNT,
    )
    log_level: str = setting(
        "info", "lowest level to log", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if not self.worker_address:
            object.__setattr__(self, "worker_address", default_worker_address())
        for spec in fields(self):
            check(spec, getattr(self, spec.name), "")
        self._check_together()

    def _check_together(self) -> None:
        if self.max_requests_per_batch > self.max_batch_tokens:
            raise ConfigError(
                "max_requests_per_batch",
                self.max_requests_per_batch,
                "",
                f"at most max_batch_tokens, which is {self.max_batch_tokens}",
            )
        if self.deterministic and self.dtype not in ("auto", "float32"):
            raise ConfigError("dtype", self.dtype, "", "float32 or auto when deterministic is set")
        scheme, _, rest = self.worker_address.partition("://")
        if scheme not in ("ipc", "tcp") or not rest:
            raise ConfigError(
                "worker_address", self.worker_address, "", "ipc://PATH or tcp://HOST:PORT"
            )
        if scheme == "ipc" and not _fits(self.worker_address):
            raise ConfigError(
                "worker_address",
                self.worker_address,
                "",
                f"an ipc path of at most {MAX_IPC_PATH_BYTES} bytes",
            )

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model

    def to_configure(self) -> link_pb2.Configure:
        """The settings for a worker. Each field of the message is a key of the same name; one
        that is not raises AttributeError."""
        names = [spec.name for spec in link_pb2.Configure.DESCRIPTOR.fields]
        return link_pb2.Configure(**{name: getattr(self, name) for name in names})


def check(spec: Field[Any], value: object, source: str) -> None:
    """Raises ConfigError unless `value` is allowed for the key."""
    rule: Rule = spec.metadata["rule"]
    maximum = _maximum(spec)
    is_in_range = not isinstance(value, int | float) or (
        (rule.minimum is None or value >= rule.minimum) and (maximum is None or value <= maximum)
    )
    is_choice = rule.choices is None or value in rule.choices
    if not (_has_type(spec, value) and is_in_range and is_choice):
        raise ConfigError(spec.name, value, source, allowed(spec))


def _maximum(spec: Field[Any]) -> float | None:
    """The key's own maximum, or that of its field in the Configure message."""
    rule: Rule = spec.metadata["rule"]
    return _MAXIMA.get(spec.name) if rule.maximum is None else rule.maximum


def allowed(spec: Field[Any]) -> str:
    """The allowed values of a key, in words."""
    rule: Rule = spec.metadata["rule"]
    why = f" ({rule.why})" if rule.why else ""
    if rule.choices is not None:
        return ", ".join(rule.choices)
    noun = {
        "int": "an integer",
        "float": "a number",
        "float | None": "a number",
        "bool": "true or false",
        "str": "a string in UTF-8",
    }[str(spec.type)]
    maximum = _maximum(spec)
    if rule.minimum is not None and maximum is not None:
        return f"{noun} from {rule.minimum} to {maximum}{why}"
    return noun if rule.minimum is None else f"{noun} of at least {rule.minimum}{why}"


def _has_type(spec: Field[Any], value: object) -> bool:
    match str(spec.type):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, float)
        case "float | None":
            return value is None or isinstance(value, float)
        case _:
            return isinstance(value, str) and _is_utf8(value)


def _is_utf8(text: str) -> bool:
    """Whether a protobuf message can hold it: a command line may contain any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

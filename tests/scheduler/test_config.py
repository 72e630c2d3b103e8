"""Settings: four sources, one order, and complaints that say what to change."""

from __future__ import annotations

import os
import tempfile
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from protos import link_pb2
from scheduler_svc.__main__ import make_engine
from scheduler_svc.core.policies import FIFO, POLICIES, Policy
from scheduler_svc.settings.config import Config, ConfigError, Rule, prepare_worker_address
from scheduler_svc.settings.config_sources import build_parser, load_config


def message(*arguments: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(arguments, environ)
    return str(error.value)


def test_defaults_are_valid_and_as_documented() -> None:
    """A default that its own check refuses would stop every start."""
    config = load_config([], {})
    assert (config.max_batch_tokens, config.max_requests_per_batch) == (2048, 64)
    assert (config.page_size, config.scheduler_type) == (16, "fifo")
    assert (config.port, config.model) == (50051, "smollm2-135m-instruct")
    assert config.worker_address.startswith("ipc://")
    assert config.safety_margin is None
    assert (config.allow_block_sharing, config.cpu_offload_space) == (True, 0.0)
    assert config.use_async_batching is True


def test_each_source_wins_over_the_next(tmp_path: Path) -> None:
    """An operator overrides a file by a variable, and both on the command line."""
    file = tmp_path / "chairlift.toml"
    file.write_text('page_size = 1\nmax_batch_tokens = 100\nport = 4000\ndtype = "float32"\n')
    environ = {"CHAIRLIFT_MAX_BATCH_TOKENS": "200", "CHAIRLIFT_PORT": "5000"}
    config = load_config(["--config", str(file), "--port", "6000"], environ)
    assert (config.page_size, config.max_batch_tokens, config.port) == (1, 200, 6000)
    assert config.dtype == "float32"
    assert load_config([], {**environ, "CHAIRLIFT_CONFIG": str(file)}).page_size == 1


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--deterministic"], True),
        (["--deterministic", "true"], True),
        (["--deterministic=false"], False),
        ([], False),
    ],
)
def test_switches(arguments: list[str], want: bool) -> None:
    """Both spellings are common; a switch that cannot be turned off traps who sets a variable."""
    assert load_config(arguments, {}).deterministic is want


@pytest.mark.parametrize(
    ("arguments", "environ", "parts"),
    [
        (["--page-size", "0"], {}, ["page_size is 0", "command line", "from 1 to 65536"]),
        (["--page-size", "x"], {}, ["page_size is 'x'", "command line", "an integer"]),
        (["--port", "65536"], {}, ["port is 65536", "from 0 to 65535"]),
        (["--safety-margin", "nan"], {}, ["safety_margin is 'nan'", "a number"]),
        (["--max-memory-percent", "90"], {}, ["max_memory_percent is 90.0", "0.0 to 1.0"]),
        (["--dtype", "int4"], {}, ["dtype is 'int4'", "float16, bfloat16"]),
        (["--deterministic", "perhaps"], {}, ["deterministic is 'perhaps'", "true or false"]),
        (
            ["--page-sise", "1"],
            {},
            ["unknown setting page_sise", "command line, value '1'", "Did you mean page_size?"],
        ),
        (["--zzz"], {}, ["unknown setting zzz", "Allowed: model", "max_batch_tokens"]),
        (["gpt2"], {}, ["argument is 'gpt2' (command line)", "such as --model NAME"]),
        (["--", "gpt-2"], {}, ["argument is 'gpt-2'"]),
        (["--port", "1", "2", "--zzz"], {}, ["argument is '2'"]),
        (
            [],
            {"CHAIRLIFT_MAX_BATCH_TOKEN": "5"},
            [
                "max_batch_token ",
                "environment CHAIRLIFT_MAX_BATCH_TOKEN, value '5'",
                "Did you mean",
            ],
        ),
        ([], {"CHAIRLIFT_PORT": ""}, ["port is ''", "environment CHAIRLIFT_PORT", "an integer"]),
        (
            ["--scheduler-type", "lifo"],
            {},
            ["'lifo'", "fifo, prefill_first, priority, static"],
        ),
        (["--q-padding-interval-size", "0"], {}, ["q_padding_interval_size is 0", "from 1 to"]),
        (["--cpu-offload-space", "-1"], {}, ["cpu_offload_space is -1.0", "from 0.0 to"]),
        (["--weight-format", "int4"], {}, ["weight_format is 'int4'", "float32, float16, int8"]),
        (["--kv-cache-dtype", "fp8"], {}, ["kv_cache_dtype is 'fp8'", "auto, float32, float16"]),
        (["--config", "/nowhere.toml"], {}, ["config is '/nowhere.toml'", "No such file"]),
        (
            ["--max-batch-tokens", "8", "--max-requests-per-batch", "9"],
            {},
            ["max_requests_per_batch is 9 (command", "at most max_batch_tokens, which is 8"],
        ),
        (
            ["--max-batch-tokens", "8"],
            {"CHAIRLIFT_MAX_REQUESTS_PER_BATCH": "64"},
            ["max_requests_per_batch is 64 (environment", "max_batch_tokens, which is 8"],
        ),
        (["--model", "caf\udce9"], {}, ["model is 'caf\\udce9'", "a string in UTF-8"]),
        (["--max-requests-per-batch", "2147483647"], {}, ["from 1 to 65536"]),
        (
            ["--deterministic", "--dtype", "float16"],
            {},
            ["dtype is 'float16'", "command line", "when deterministic"],
        ),
        (["--worker-address", "udp://x"], {}, ["worker_address is 'udp://x'", "ipc://PATH"]),
        (["--worker-address", "ipc://" + "x" * 108], {}, ["at most 107 bytes"]),
    ],
)
def test_a_wrong_setting_is_named(
    arguments: list[str], environ: dict[str, str], parts: list[str]
) -> None:
    """A setting that is silently ignored costs somebody a night."""
    text = message(*arguments, **environ)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("spec", fields(Config), ids=lambda spec: spec.name)
def test_integers_have_a_maximum(spec: Field[Any]) -> None:
    """A worker is told in fields of 32 and 64 bits: beyond them comes a traceback, no sentence,
    and before them arrays that no memory holds."""
    if str(spec.type) != "int":
        return
    flag = "--" + spec.name.replace("_", "-")
    text = message(flag, str(1 << 63))
    assert f"{spec.name} is {1 << 63} (command line); allowed: an integer from" in text
    maximum = int(text.rpartition(" ")[2])
    config = load_config([flag, str(maximum)], {})
    assert getattr(config, spec.name) == maximum
    config.to_configure()
    assert f"allowed: an integer from {spec.metadata['rule'].minimum} to" in text


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--max-batch-tokens", "32"], (32, 32)),
        (["--max-batch-tokens", "64"], (64, 64)),
        (["--max-batch-tokens", "4096"], (4096, 64)),
        (["--max-requests-per-batch", "4096"], (4096, 4096)),
        (["--max-requests-per-batch", "8"], (2048, 8)),
    ],
)
def test_a_default_follows_what_is_set(arguments: list[str], want: tuple[int, int]) -> None:
    """Who sets one value is not to be refused in the name of another that nobody set."""
    config = load_config(arguments, {})
    assert (config.max_batch_tokens, config.max_requests_per_batch) == want


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("page_size = 'x'", ["page_size is 'x'", "chairlift.toml", "an integer"]),
        ("page_size = true", ["page_size is True", "an integer"]),
        ("page_size = 1.5", ["page_size is 1.5", "an integer"]),
        ("deterministic = 1", ["deterministic is 1", "true or false"]),
        ("safety_margin = inf", ["safety_margin is inf", "a number"]),
        ("model = 5", ["model is 5", "a string"]),
        ("[scheduler]\npage_size = 1", ["unknown setting scheduler", "scheduler_type"]),
        ("page_size =", ["chairlift.toml", "a TOML file"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, parts: list[str]) -> None:
    """The same, for a file: types are strict there."""
    file = tmp_path / "chairlift.toml"
    file.write_text(content)
    text = message("--config", str(file))
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("margin", [None, 0.4])
def test_the_engine_does_what_is_set(policy: Policy, margin: float | None) -> None:
    """A setting that is accepted, shown, and never reaches the scheduler."""
    arguments = (
        f"--scheduler-type {policy.name} --allow-block-sharing=false --use-async-batching=false"
    )
    given = [] if margin is None else [f"--safety-margin={margin}"]
    config = load_config([*arguments.split(), *given, "--target-step-ms=70"], {})
    state = make_engine(config)._state
    assert state.policy is policy
    assert state.limits.safety_margin == (policy.safety_margin if margin is None else margin)
    assert (state.limits.allow_block_sharing, state.limits.max_plans_in_flight) == (False, 1)
    assert state.limits.target_step_ms == 70
    state = make_engine(Config())._state
    assert state.policy is FIFO
    assert (state.limits.allow_block_sharing, state.limits.max_plans_in_flight) == (True, 2)
    assert state.limits.target_step_ms is None, "by device"


def test_other_variables_are_left_alone() -> None:
    """They belong to other parts; refusing them would stop the scheduler of a normal set-up."""
    environ = {"CHAIRLIFT_CACHE_DIR": "/x", "CHAIRLIFT_CURVE_SECRET": "y", "PATH": "z"}
    assert load_config([], environ) == load_config([], {})


def test_integers_are_numbers_in_a_file(tmp_path: Path) -> None:
    """`drain_grace = 5` is what people write."""
    file = tmp_path / "chairlift.toml"
    file.write_text("drain_grace = 5")
    assert load_config(["--config", str(file)], {}).drain_grace == 5.0


def test_every_key_has_help_and_a_flag() -> None:
    """An option that nobody can find is none."""
    shown = build_parser().format_help()
    for spec in fields(Config):
        rule: Rule = spec.metadata["rule"]
        assert len(rule.help) > 10, spec.name
        assert "--" + spec.name.replace("_", "-") in shown


def test_a_worker_is_told_everything_it_needs() -> None:
    """A field forgotten here would silently be 0 in the worker."""
    config = load_config(["--page-size", "4", "--num-blocks", "7", "--num-threads", "2"], {})
    told = config.to_configure()
    assert isinstance(told, link_pb2.Configure)
    for spec in told.DESCRIPTOR.fields:
        assert getattr(told, spec.name) == getattr(config, spec.name), spec.name


def test_the_default_socket_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can reach the socket can read every prompt."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = Config().worker_address
    prepare_worker_address(address)
    folder = Path(address.removeprefix("ipc://")).parent
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in Config().worker_address


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_long_folder_is_no_place_for_the_default_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Clusters have such scratch folders, and nobody who starts there has named a socket."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what is known of TMPDIR
    address = Config().worker_address
    assert len(address) <= 107 + len("ipc://")
    assert str(os.getuid()) in address


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """An OSError alone does not say which setting it is about."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"worker_address is .*Not a directory"):
        prepare_worker_address(f"ipc://{tmp_path}/file/below/worker")


def test_a_heartbeat_timeout_leaves_room_for_several_heartbeats() -> None:
    """A worker that beats as it should is lost and greeted again for ever."""
    text = message("--heartbeat-timeout", "1.9")
    assert "heartbeat_timeout is 1.9" in text
    assert "at least 2.0 (a worker sends one every 0.5 s" in text
    assert load_config(["--heartbeat-timeout", "2"], {}).heartbeat_timeout == 2.0
    assert load_config([], {}).to_configure().step_timeout == 300.0

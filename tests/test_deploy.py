"""The systemd units and the example configuration are what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from client.processes.supervisor import FATAL_EXIT_CODE

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNITS = ("chairlift-scheduler.service", "chairlift-worker.service")
PAIR = ("chairlift-scheduler@.service", "chairlift-worker@.service")
GATEWAY = "chairlift-gateway.service"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_units_are_valid(tmp_path: Path) -> None:
    """A misspelt key is ignored by systemd at run time, with a line in a log nobody reads."""
    program = tmp_path / "chairlift"  # verify wants it to exist
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in (*UNITS, *PAIR, GATEWAY):
        unit = (DEPLOY / name).read_text().replace("/opt/chairlift/bin/chairlift", str(program))
        unit = unit.replace("/opt/chairlift/bin/smg", str(program))
        # whether a user of that name exists is this machine's matter
        (tmp_path / name).write_text(unit.replace("User=chairlift", "User=root"))
    names = [*UNITS, *(name.replace("@", "@1") for name in PAIR), GATEWAY]
    instances = [str(tmp_path / name) for name in names]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *instances],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    ours = [line for line in done.stderr.splitlines() if "chairlift" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr


def test_both_units_meet_at_the_configured_socket() -> None:
    """Two files name it: if they differ, the worker waits for ever and nobody says why."""
    address = tomllib.loads((DEPLOY / "chairlift.toml").read_text())["worker_address"]
    assert f"--connect {address}\n" in (DEPLOY / UNITS[1]).read_text()
    folder = re.search(r"^RuntimeDirectory=(.*)$", (DEPLOY / UNITS[0]).read_text(), re.MULTILINE)
    assert folder is not None
    assert address.startswith(f"ipc:///run/{folder[1]}/")


def test_systemd_and_serve_agree_on_what_is_fatal() -> None:
    """Otherwise a refused model is restarted for ever by one of the two."""
    for name in UNITS + PAIR:
        assert f"\nRestartPreventExitStatus={FATAL_EXIT_CODE}\n" in (DEPLOY / name).read_text()


def test_the_example_configuration_loads() -> None:
    """A copied example that is refused is the worst first impression."""
    from scheduler_svc.settings.config_sources import load_config

    path = DEPLOY / "chairlift.toml"
    config = load_config(["--config", str(path)], {})
    for key, value in tomllib.loads(path.read_text()).items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", [*UNITS, *PAIR, GATEWAY])
def test_units_allow_enough_descriptors(name: str) -> None:
    """systemd's own limit is 1,024: a thousand clients, and a worker cannot come back."""
    limit = re.search(r"^LimitNOFILE=(\d+)$", (DEPLOY / name).read_text(), re.MULTILINE)
    assert limit is not None
    assert int(limit[1]) >= 16_384


def test_a_template_differs_from_the_single_unit_in_its_addresses_only() -> None:
    """Two copies drift apart: a repair of one of them is missing in the other."""
    for single, template in zip(UNITS, PAIR, strict=True):
        names = re.compile(r"^(?!#)(\w+)=", re.MULTILINE)
        one, other = ((DEPLOY / name).read_text() for name in (single, template))
        assert names.findall(one) == names.findall(other)
        text = other.replace("chairlift-%i", "chairlift").replace("chairlift-scheduler@%i", "X")
        for key in ("Restart", "RestartPreventExitStatus", "TimeoutStopSec", "WatchdogSec", "Type"):
            setting = re.compile(rf"^{key}=.*$", re.MULTILINE)
            assert setting.findall(one) == setting.findall(text)


def test_the_gateway_stands_before_both_pairs() -> None:
    """Three files name the addresses; nobody misses a pair until the other one dies."""
    scheduler, worker, gateway = ((DEPLOY / name).read_text() for name in (*PAIR, GATEWAY))
    port = re.search(r"--port (\d+)%i", scheduler)
    address = re.search(r"--worker-address (\S+)", scheduler)
    assert port is not None
    assert address is not None
    assert f"--connect {address[1]}\n" in worker
    folder = re.search(r"^RuntimeDirectory=(.*)$", scheduler, re.MULTILINE)
    assert folder is not None
    assert address[1].startswith(f"ipc:///run/{folder[1]}/")
    urls = " ".join(f"grpc://127.0.0.1:{port[1]}{number}" for number in (1, 2))
    assert f"--worker-urls {urls} " in gateway


@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs smg")
def test_the_gateway_knows_its_options() -> None:
    """A newer gateway that renames one would not start."""
    text = (DEPLOY / GATEWAY).read_text().replace("\\\n", " ")
    line = re.search(r"^ExecStart=\S+ launch (.*)$", text, re.MULTILINE)
    assert line is not None
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "smg.cli", "launch", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    options = set(re.findall(r"--[\w-]+", line[1]))
    assert options <= set(re.findall(r"--[\w-]+", shown))

"""`chairlift serve` with children that only live, die and listen to signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client.commands import serve
from client.processes import gateway, launch, supervisor
from tests.support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
EXIT_ON_ERROR = "--exit-on-model-error=true"  # else a model without a tokenizer is never ready

# Says that it is up, then does what its variable says; both print to the pipe that the test reads.
CHILD = """
import os, pathlib, signal, sys, time
name = {name!r}
behaviour = os.environ.get("FAKE_" + name.upper(), "live")
def say(*words):
    os.write(1, (" ".join([name, *words]) + chr(10)).encode())  # one write: lines stay whole
def on_term(*_):
    say("told to stop")
    if behaviour != "stubborn":
        sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
say("up", *sys.argv[1:])
pathlib.Path(os.environ["FAKE_MARK"] + name).touch()
if behaviour.startswith("exit"):
    sys.exit(int(behaviour.split()[1]))
if behaviour == "die once":
    mark = pathlib.Path(os.environ["FAKE_MARK"])
    if not mark.exists():
        mark.touch()
        while not pathlib.Path(os.environ["FAKE_MARK"] + "scheduler").exists():
            time.sleep(0.01)  # the test waits for both to be up
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""


class Serving:
    """A running `chairlift serve`, and the lines that it and its children print."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def expect(self, start: str) -> str:
        """The next line that starts so; those before it are kept in `lines`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def rest(self) -> list[str]:
        """All further lines, once everybody who could print has ended."""
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)
        return self.lines

    def both_up(self) -> tuple[list[str], list[str]]:
        """The arguments of scheduler and worker, once both listen to signals."""
        up = self.up(2)
        return up["scheduler"], up["worker"]

    def up(self, count: int) -> dict[str, list[str]]:
        """The arguments of so many children, by name, once all listen to signals."""
        up: dict[str, list[str]] = {}
        while len(up) < count:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, f"ended early: {self.lines}"
            self.lines.append(line.rstrip())
            name, _, rest = line.partition(" up ")
            if rest:
                up[name] = rest.split()
        return up


Run = Callable[..., Serving]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    for package, module, name in (
        ("scheduler_svc", "__main__", "scheduler"),
        ("worker", "__main__", "worker"),
        ("smg", "cli", "gateway"),
        ("smg_grpc_proto", "unused", ""),
    ):
        folder = tmp_path / "fakes" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / f"{module}.py").write_text(CHILD.format(name=name))
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **behaviours: str) -> Serving:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path / 'fakes'}:{ROOT}",
            "FAKE_MARK": str(tmp_path / "mark"),
            **{
                name if name == "TMPDIR" else f"FAKE_{name.upper()}": value
                for name, value in behaviours.items()
            },
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "client", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        started.append(process)
        return Serving(process)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_both_in_order(run: Run, how: signal.Signals) -> None:
    """The scheduler drains first: without its worker the running answers could not end."""
    serving = run("--port", "0")
    scheduler, worker = serving.both_up()
    assert scheduler[:4] == [EXIT_ON_ERROR, "--port", "0", "--worker-address"]
    assert worker == ["--connect", scheduler[4]]
    serving.process.send_signal(how)
    told = [line for line in serving.rest() if line.endswith("told to stop")]
    assert told == ["scheduler told to stop", "worker told to stop"]
    assert serving.process.wait(20) == 0
    assert not Path(scheduler[4].removeprefix("ipc://")).parent.exists()


def test_a_given_worker_address_is_used_by_both(run: Run) -> None:
    """Whoever names an address wants to attach something there."""
    serving = run("--worker-address=tcp://127.0.0.1:5999")
    scheduler, worker = serving.both_up()
    assert scheduler == [EXIT_ON_ERROR, "--worker-address=tcp://127.0.0.1:5999"]
    assert worker == ["--connect", "tcp://127.0.0.1:5999"]


def test_a_second_ctrl_c_kills(run: Run) -> None:
    """A drain can take long; who presses twice does not want to wait for it."""
    serving = run(scheduler="stubborn", worker="stubborn")
    serving.both_up()
    serving.process.send_signal(signal.SIGINT)
    serving.expect("scheduler told to stop")
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(20) == 130
    assert "chairlift: killing all processes" in serving.rest()


def test_a_worker_that_dies_comes_back(run: Run) -> None:
    """The scheduler keeps its requests for exactly this."""
    serving = run(worker="die once")
    serving.both_up()
    line = serving.expect("chairlift: the worker ended")
    assert line.endswith("(by SIGKILL); restarting it in 0.5 s")
    serving.expect("worker up --connect ipc://")
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(20) == 0


def test_a_worker_that_can_never_serve_ends_both(run: Run) -> None:
    """A model that is refused is refused each time: the restart loop would hide the reason."""
    serving = run(worker="exit 2")
    assert serving.expect("chairlift: the worker cannot").endswith(
        "(exit code 2); stopping the scheduler"
    )
    assert serving.process.wait(20) == 2


@pytest.mark.parametrize("code", [0, 2])
def test_an_end_of_the_scheduler_ends_the_worker(run: Run, code: int) -> None:
    """A worker without its scheduler would hold the device's memory for nobody."""
    serving = run(scheduler=f"exit {code}")
    line = serving.expect("chairlift: the scheduler ended")
    assert line.endswith(f"(exit code {code}); stopping the others")
    assert serving.process.wait(20) == code


def test_a_long_tmpdir_is_no_place_for_the_socket(run: Run, tmp_path: Path) -> None:
    """A cluster's scratch folder: the address would not fit, and the user has named none."""
    long = tmp_path / ("x" * 133)
    long.mkdir()
    serving = run(TMPDIR=str(long))
    _, (_, address) = serving.both_up()
    assert len(address.removeprefix("ipc://")) <= 107
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(20) == 0


def test_no_place_for_the_socket_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which variable to change, rather than a traceback."""

    def mkdtemp(prefix: str, dir: str) -> str:
        raise PermissionError(dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with (
        pytest.raises(launch.LaunchError, match=r"/tmp.* cannot be written.*set TMPDIR"),
        serve.worker_address([]),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_do_not_outlive_a_killed_parent(run: Run) -> None:
    """Orphans would keep port and device, and the next start would fail."""
    serving = run()
    serving.both_up()
    serving.process.kill()
    told = {line for line in serving.rest() if line.endswith("told to stop")}
    assert told == {"scheduler told to stop", "worker told to stop"}


def test_the_pause_grows_to_a_limit() -> None:
    """A worker that dies at once must not be started in a tight loop, nor given up."""
    pauses = [supervisor.restart_pause(deaths) for deaths in (1, 2, 3, 20, 10_000)]
    assert pauses == [0.5, 1.0, 2.0, 15.0, 15.0]


def test_help_shows_the_schedulers_options(run: Run) -> None:
    """`serve` has none of its own: without them its help would be empty."""
    serving = run("--help", scheduler="exit 0")
    assert "scheduler up --help" in serving.rest()
    assert serving.lines[0] == (
        "usage: chairlift serve [--gateway] [scheduler options] [-- smg options]"
    )
    assert serving.process.wait(20) == 0


def gateway_options() -> list[str]:
    return ["--gateway", "--http-port", str(free_port()), "--port", "50061"]


def test_the_gateway_stands_before_the_scheduler(run: Run) -> None:
    """It must find the scheduler, and the scheduler must not be given its options."""
    options = gateway_options()
    serving = run(*options)
    up = serving.up(3)
    assert up["scheduler"][:4] == [EXIT_ON_ERROR, "--port", "50061", "--worker-address"]
    line = " ".join(up["gateway"])
    assert f"--port {options[2]} " in line
    assert "--worker-urls grpc://127.0.0.1:50061 " in line
    serving.process.terminate()
    stops = [line for line in serving.rest() if "told to stop" in line]
    assert [line.split()[0] for line in stops] == ["gateway", "scheduler", "worker"]
    assert serving.process.wait() == 0


@pytest.mark.parametrize(
    ("behaviours", "code"),
    [({"gateway": "exit 3"}, 3), ({"gateway": "exit 0"}, 1), ({"scheduler": "exit 5"}, 5)],
    ids=str,
)
def test_all_end_with_the_gateway_or_the_scheduler(
    run: Run, behaviours: dict[str, str], code: int
) -> None:
    """A service that lost its front, or what is behind it, must not look alive."""
    serving = run(*gateway_options(), **behaviours)
    assert serving.process.wait(30) == code, serving.rest()


def test_a_port_that_is_taken_is_named_before_anything_starts(run: Run) -> None:
    """Else the model is loaded first, for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = run("--gateway", "--http-port", str(port))
        assert serving.process.wait(30) == 1
    assert f"the gateway cannot listen on 127.0.0.1, port {port}" in "".join(serving.rest())


def test_options_behind_two_dashes_are_the_gateways(run: Run) -> None:
    """A tool parser is chosen there; without a gateway they would vanish."""
    serving = run(*gateway_options(), "--", "--tool-call-parser", "json")
    up = serving.up(3)
    assert up["gateway"][-2:] == ["--tool-call-parser", "json"]
    assert "--tool-call-parser" not in up["scheduler"]
    refused = run("--", "--tool-call-parser", "json")
    assert refused.process.wait(30) == 1
    assert "give --gateway, too" in "".join(refused.rest())


def test_a_missing_gateway_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an ImportError from a child."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(launch.LaunchError, match=r"pip install 'chairlift\[gateway\]'"):
        gateway.gateway_line(gateway.GatewayOptions(True, free_port(), "127.0.0.1"), [])


def test_the_gateway_finds_where_the_scheduler_listens(tmp_path: Path) -> None:
    """Command line, then environment, then file, as for the scheduler itself."""
    file = tmp_path / "chairlift.toml"
    file.write_text('host = "::"\nport = 7\n')
    config = ["--config", str(file)]
    assert gateway.endpoint([], {}) == ("0.0.0.0", "50051")
    assert gateway.endpoint(config, {}) == ("::", "7")
    assert gateway.endpoint(config, {"CHAIRLIFT_PORT": "8"}) == ("::", "8")
    assert gateway.endpoint([*config, "--port=9"], {"CHAIRLIFT_PORT": "8"}) == ("::", "9")

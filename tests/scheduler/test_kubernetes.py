"""Variables of Kubernetes' Services are no settings; mistyped settings are none of these."""

from __future__ import annotations

import logging

import pytest

from scheduler_svc.settings.config import ConfigError
from scheduler_svc.settings.config_sources import load_config
from scheduler_svc.settings.kubernetes import note_service_links


def service(name: str, port: int = 50051, port_name: str = "") -> dict[str, str]:
    """What Kubernetes sets for a Service of that name."""
    links = {
        f"{name}_SERVICE_HOST": "10.96.12.7",
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_PORT": f"tcp://10.96.12.7:{port}",
        f"{name}_PORT_{port}_TCP": f"tcp://10.96.12.7:{port}",
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": "10.96.12.7",
    }
    if port_name:
        links[f"{name}_SERVICE_PORT_{port_name}"] = str(port)
    return links


@pytest.mark.parametrize(
    "environ",
    [
        service("CHAIRLIFT"),
        service("CHAIRLIFT", port_name="GRPC_WEB"),
        service("CHAIRLIFT_METRICS", 9100),
        {**service("CHAIRLIFT"), **service("CHAIRLIFT_METRICS", 9100, "HTTP")},
        service("CHAIRLIFT_SERVICE"),
        service("CHAIRLIFT_PORT"),
        {"CHAIRLIFT_SERVICE_HOST": "10.96.12.7"},
        {"CHAIRLIFT_PORT": "udp://[fd00::7]:53", "CHAIRLIFT_METRICS_PORT": "tcp://10.0.0.1:80"},
    ],
)
def test_services_are_left_alone(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has set them: with a Service of that name in the namespace nothing would start."""
    assert load_config([], environ) == load_config([], {})
    with caplog.at_level(logging.INFO):
        note_service_links(environ)
    assert "CHAIRLIFT" in caplog.text
    assert len(caplog.records) == 1


def test_a_port_that_somebody_set_counts() -> None:
    """A pod's own variables replace those of Services."""
    assert load_config([], {**service("CHAIRLIFT"), "CHAIRLIFT_PORT": "4000"}).port == 4000


@pytest.mark.parametrize(
    "environ",
    [
        {"CHAIRLIFT_SERVICE_PORT": "50051"},
        {"CHAIRLIFT_METRICS_PORT": "9100"},
        {"CHAIRLIFT_PORT": "tcp://10.96.12.7"},
        {**service("CHAIRLIFT"), "CHAIRLIFT_SERVICE_HOSTS": "10.96.12.7"},
        {**service("CHAIRLIFT"), "CHAIRLIFT_PAGE_SISE": "1"},
        {**service("CHAIRLIFT_METRICS"), "CHAIRLIFT_PORT_50051_TCP": "tcp://10.96.12.7:50051"},
    ],
)
def test_what_only_looks_alike_is_refused(environ: dict[str, str]) -> None:
    """A setting that is silently ignored costs somebody a night."""
    with pytest.raises(ConfigError):
        load_config([], environ)


def test_nothing_is_said_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """Most machines are no pods."""
    with caplog.at_level(logging.INFO):
        note_service_links({"CHAIRLIFT_PORT": "4000", "OTHER_SERVICE_HOST": "10.0.0.1"})
    assert caplog.records == []

"""Recognises the variables that Kubernetes sets in every container, about Services.

For a Service called `chairlift` they are CHAIRLIFT_SERVICE_HOST, CHAIRLIFT_SERVICE_PORT,
CHAIRLIFT_SERVICE_PORT_<NAME>, CHAIRLIFT_PORT=tcp://10.96.12.7:50051 and
CHAIRLIFT_PORT_50051_TCP[_ADDR|_PORT|_PROTO]; for one called `chairlift-metrics` they begin with
CHAIRLIFT_METRICS. They look like settings, but nobody has set them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

_HOST: Final = re.compile(r"(CHAIRLIFT(?:_\w+?)?)_SERVICE_HOST")
_PORT: Final = re.compile(r"(CHAIRLIFT(?:_\w+?)?)_PORT")
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_SUFFIX: Final = re.compile(
    r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)


def service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of such Services, each with the Service's part of its name.

    A Service is recognised by its _SERVICE_HOST or by a _PORT that is an address. A _PORT that is
    not an address was set by somebody.
    """
    services = {found[1] for name in environ if (found := _HOST.fullmatch(name))}
    ports = {
        name: found[1]
        for name, value in environ.items()
        if (found := _PORT.fullmatch(name)) and _ADDRESS.fullmatch(value)
    }
    links = dict(ports)
    for service in sorted(services.union(ports.values())):
        for name in environ:
            if name.startswith(service) and _SUFFIX.fullmatch(name, len(service)):
                links[name] = service
    return links


def note_service_links(environ: Mapping[str, str]) -> None:
    """Logs one line, so that a CHAIRLIFT_PORT without effect is explained."""
    links = service_links(environ)
    if links:
        logger.info(
            "ignored %d variables that Kubernetes sets for Services (%s); to omit them, set "
            "enableServiceLinks: false in the pod's spec",
            len(links),
            ", ".join(sorted(set(links.values()))),
        )

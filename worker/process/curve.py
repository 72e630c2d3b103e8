"""The keys of an encrypted link (CURVE), which tcp addresses need.

Two environment variables name key files as `zmq.auth.create_certificates` writes them; set both or
neither:

    CHAIRLIFT_CURVE_KEY_FILE         this worker's own secret key (NAME.key_secret)
    CHAIRLIFT_CURVE_SERVER_KEY_FILE  the scheduler's public key (NAME.key)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zmq.auth import load_certificate


@dataclass(frozen=True, slots=True)
class CurveKeys:
    public: bytes  # Z85, as zmq expects them
    secret: bytes
    server: bytes

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> CurveKeys | None:
        """None if neither variable is set. Raises ValueError for one without the other, OSError
        or ValueError for a file that cannot be read."""
        own = environment.get("CHAIRLIFT_CURVE_KEY_FILE")
        server = environment.get("CHAIRLIFT_CURVE_SERVER_KEY_FILE")
        if not own and not server:
            return None
        if not own or not server:
            absent = "CHAIRLIFT_CURVE_SERVER_KEY_FILE" if own else "CHAIRLIFT_CURVE_KEY_FILE"
            raise ValueError(f"{absent} is not set; CURVE needs both key files")
        public, secret = load_certificate(Path(own))
        if secret is None:
            raise ValueError(f"CHAIRLIFT_CURVE_KEY_FILE {own} contains no secret key")
        return CurveKeys(public=public, secret=secret, server=load_certificate(Path(server))[0])

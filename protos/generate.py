"""Regenerates the committed protobuf code: `python -m protos.generate` (or `--check`).

protoc runs from the repository's root with `-I .`, so that the generated imports read
`from protos import …` and need no repair.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("protos/admin.proto", "protos/inference.proto", "protos/link.proto")
WITHOUT_SERVICE = {"protos/link.proto"}


def generate(into: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py of all SOURCES below `into`/protos."""
    from grpc_tools import protoc

    for source in SOURCES:
        arguments = ["protoc", f"-I{ROOT}", f"--python_out={into}", f"--pyi_out={into}"]
        if source not in WITHOUT_SERVICE:
            arguments.append(f"--grpc_python_out={into}")
        if protoc.main([*arguments, str(ROOT / source)]) != 0:
            raise SystemExit(f"protoc failed on {source}")


def stale_files() -> list[str]:
    """Committed generated files that differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {
            path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.py*")
        }
    committed = {path.relative_to(ROOT) for path in (ROOT / "protos").glob("*_pb2*.py*")}
    return sorted(
        str(path)
        for path in fresh.keys() | committed
        if path not in fresh or path not in committed or (ROOT / path).read_bytes() != fresh[path]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    for path in stale:
        print(f"{path} is stale: run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares a server's answers with its OpenAPI document: Schemathesis makes the requests."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from matrix import Client, catalogue, install

from c2cserve.bench.specialists import running_server

_TOOL = Client("Schemathesis", "", "schemathesis", ("schemathesis",))
_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
)  # fmt: skip
_ENDLESS = "/dashboard/events"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--packages", type=Path, default=Path(tempfile.gettempdir()) / "c2cserve-clients"
    )
    parser.add_argument("--examples", type=int, default=30, help="of each operation and phase")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tool = install(_TOOL, options.packages).with_name("schemathesis")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(catalogue(Path(folder))) as (url, _),
    ):
        command = [
            str(tool), "run", f"{url}/openapi.json", "--checks", ",".join(_CHECKS),
            "--exclude-path", _ENDLESS, "--phases", "examples,coverage,fuzzing",
            "--max-examples", str(options.examples), "--seed", str(options.seed),
            "--continue-on-failure", "--request-timeout", "60", "--warnings", "off",
        ]  # fmt: skip
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

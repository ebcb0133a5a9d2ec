"""What is needed to judge a result: its date, version, commit, machine and parameters."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from c2cserve import __version__
from c2cserve.devices.discover import discover


def provenance(**parameters: object) -> dict[str, Any]:
    """Return the fields that stand before a result in its JSON file."""
    machine = discover()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "machine": {
            "cpu": machine.cpu_name,
            "cpus": len(machine.cpus),
            "isa": list(machine.isa),
            "kernel": platform.release(),
            "load_before": os.getloadavg()[0],
        },
        "parameters": parameters,
    }


def commit() -> str:
    """Return $C2CSERVE_COMMIT, else the commit of the checkout that this runs from.

    It is "" for an installed package. A copy of a checkout on another machine may have the history
    of another branch, hence the variable."""
    root, git = Path(__file__).parents[3], shutil.which("git")
    if said := os.environ.get("C2CSERVE_COMMIT"):
        return said
    if git is None or not (root / ".git").exists():
        return ""
    command = [git, "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

"""Results with what is needed to judge them: machine, date, commit."""

import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from c2cserve.devices.discover import discover


def report(results: Any, out: Path | None, *, show: bool = True, **parameters: object) -> None:
    """Print as JSON if it is to be shown, and write to `out` if given."""
    machine = discover()
    whole = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": machine.cpu_name,
            "cpus": len(machine.cpus),
            "isa": list(machine.isa),
            "kernel": platform.release(),
            "load_before": os.getloadavg()[0],
        },
        "parameters": parameters,
        "results": results,
    }
    text = json.dumps(whole, indent=1)
    if show:
        print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def commit() -> str:
    """What $C2CSERVE_COMMIT says, else of this checkout; nothing if neither is known. A copy of a
    checkout on another machine may have the history of another branch."""
    if (said := os.environ.get("C2CSERVE_COMMIT")) or shutil.which("git") is None:
        return said or ""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()

"""Results with what is needed to judge them: machine, date, commit."""

import json
from pathlib import Path
from typing import Any

from c2cserve.bench.provenance import provenance


def report(results: Any, out: Path | None, *, show: bool = True, **parameters: object) -> None:
    """Print as JSON if it is to be shown, and write to `out` if given."""
    text = json.dumps({**provenance(**parameters), "results": results}, indent=1)
    if show:
        print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")

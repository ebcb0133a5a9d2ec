"""Violations: told at once, kept as lines of JSON; and the counts of a run."""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.case import Case, Reply

_TOLD_OF_A_KIND = 5
"""Violations with one name that are printed; all are counted and kept."""


class Findings:
    def __init__(self, out: Path, seed: int, began_s: float, tell: Callable[[str], None]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "violations.jsonl"
        self.file.write_text("")
        self._seed, self._began_s, self._tell = seed, began_s, tell
        self.phase = ""
        self.violations: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        """By kind and what became of them."""
        self.checks: Counter[str] = Counter()
        """Answers by how they were checked."""
        self.events: Counter[str] = Counter()
        """What was done to the server."""

    def violation(
        self, name: str, expected: object, came: object, case: Case | None = None,
        reply: Reply | None = None,
    ) -> None:  # fmt: skip
        self.violations[name] += 1
        line: dict[str, Any] = {
            "seed": self._seed, "phase": self.phase,
            "at_s": round(time.monotonic() - self._began_s, 3), "name": name,
            "expected": expected, "came": came, "sent": case and case.shown(),
            "reply": reply and reply.shown(),
        }  # fmt: skip
        with self.file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        if self.violations[name] <= _TOLD_OF_A_KIND:
            what = f" [{case.id} {case.kind}, {case.body.get('model')}]" if case else ""
            self._tell(f"VIOLATION {name}{what}: expected {expected}; came {str(came)[:600]}")

    def counted(self, case: Case, reply: Reply) -> None:
        status = reply.end if reply.status is None else str(reply.status)
        ended = "" if reply.end in ("whole", "done") else f", {reply.end}"
        self.requests[f"{case.kind}: {status}{ended}"] += 1

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self._seed, "violations": dict(self.violations),
            "requests": dict(sorted(self.requests.items())), "checks": dict(self.checks),
            "events": dict(self.events),
        }  # fmt: skip

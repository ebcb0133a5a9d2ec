"""Usage of every key since the start of the server, and refusals by limit."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from c2cserve.core.model import name_of

if TYPE_CHECKING:
    from c2cserve.server.choices import ChoiceStream
    from c2cserve.server.prepare import Prepared


@dataclass(slots=True)
class Used:
    """Work that was done. A prompt counts once, however many choices answer it, as in `usage`."""

    requests: int = 0
    """Requests of which at least one choice reached a slice."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    output_tokens: int = 0

    def add(self, more: "Used") -> None:
        self.requests += more.requests
        self.prompt_tokens += more.prompt_tokens
        self.cached_tokens += more.cached_tokens
        self.output_tokens += more.output_tokens


FIELDS = tuple(asdict(Used()))
_COLUMNS = ("key", "tenant", "model", *FIELDS)


def used_by(prepared: "Prepared", choices: Sequence["ChoiceStream"]) -> Used:
    """Return what a request has used so far. Prompts that reached no slice cost nothing."""
    used, each = Used(), len(choices) // max(1, len(prepared.prompts))
    for number, prompt in enumerate(prepared.prompts):
        group = choices[number * each : (number + 1) * each]
        if any(choice.timing is not None for choice in group):
            used.requests = 1
            used.prompt_tokens += len(prompt.tokens)
            used.cached_tokens += group[0].cached_tokens
    used.output_tokens = sum(choice.output_tokens for choice in choices)
    return used


def model_name(prepared: "Prepared") -> str:
    return name_of(prepared.jobs[0].request.model)


class UsageTotals:
    """What keys have used in this run: one `Used` per pair of key and model seen together."""

    def __init__(self) -> None:
        self.since = datetime.now(UTC)
        self.refused: Counter[tuple[str, str]] = Counter()
        """Requests by key and by the limit that they did not fit in."""
        self._used: dict[tuple[str, str, str], Used] = {}

    def add(self, key: str, tenant: str, model: str, used: Used) -> None:
        self._used.setdefault((key, tenant, model), Used()).add(used)

    def by_key(self) -> dict[str, Used]:
        totals: dict[str, Used] = {}
        for (key, _, _), used in self._used.items():
            totals.setdefault(key, Used()).add(used)
        return totals

    def rows(self) -> list[dict[str, object]]:
        """Return a row per key and model, sorted by both."""
        return [
            {**dict(zip(_COLUMNS, names, strict=False)), **asdict(used)}
            for names, used in sorted(self._used.items())
        ]

    def report(self) -> dict[str, object]:
        refused = sorted(self.refused.items())
        return {
            "since": self.since.isoformat(timespec="seconds"),
            "usage": self.rows(),
            "refused": [
                {"key": key, "limit": limit, "requests": count} for (key, limit), count in refused
            ],
        }


def as_csv(rows: Sequence[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()

"""Where the time to the first token of late answers went: the client's records beside the server's
log."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.report import SloTargets


class ServerLog:
    """The lines that a server wrote since the last look, with `--log-format json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def parts_ms(self) -> dict[str, dict[str, float]]:
        """Return the parts of each answer's time to first token, by its request's id."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new.rfind(b"\n") + 1
        self._at += whole
        found: dict[str, dict[str, float]] = {}
        for line in new[:whole].splitlines():
            if b'"ttft_parts_ms":{"' in line:
                fields: dict[str, Any] = json.loads(line)
                found[fields["request_id"]] = fields["ttft_parts_ms"]
        return found


def late_first_tokens(
    records: Iterable[Record], slo: SloTargets, parts_ms: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return how many answers were late by their first tokens and by the others, and of the former
    the mean parts, milliseconds. `lag`: until the generator had sent the request. `rest`: what
    neither side has seen, on the way and in the generator after the token came. `ttft_server`: how
    many of the first tokens were late without both."""
    answered = [record for record in records if record.ok]
    first = [record for record in answered if record.ttft_s > slo.ttft_s]
    slow = sum((record.tpot_s or 0.0) > slo.tpot_s for record in answered)
    rows = [_row(one, parts_ms[one.request_id]) for one in first if one.request_id in parts_ms]
    server_ms = [sum(row.values()) - row["lag"] - row["rest"] for row in rows]
    own = sum(one > 1e3 * slo.ttft_s for one in server_ms)
    return {"ttft": len(first), "tpot": slow, "ttft_server": own, **_means(rows)}


def _row(record: Record, parts_ms: Mapping[str, float]) -> dict[str, float]:
    lag_ms = 1e3 * (record.sent_s - record.due_s)
    rest_ms = 1e3 * record.ttft_s - lag_ms - sum(parts_ms.values())
    return {"lag": lag_ms, **parts_ms, "rest": rest_ms}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = rows[0] if rows else ()
    return {f"{name}_ms": round(sum(row[name] for row in rows) / len(rows), 1) for name in names}

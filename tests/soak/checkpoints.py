"""Checkpoints that no server should serve, added while it serves others.

Each ends as a refusal that says why, or as a model whose requests are answered or refused by name;
and it can be removed. What the other models say is compared as ever.
"""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from hostile_checkpoints import Case, Generator
from hostile_requests import ENDLESS, HUGE, ON_REQUEST

from soak.catalogue import SPECIALISTS
from soak.findings import Findings
from soak.judge import Judge, error_faults

_WITHIN_S = 120.0
"""Of one answer. Removing drains first."""
_SKIPPED_MOST = 12
"""Of the generator's cases, between two that are tried."""
_BASE = "adder-qwen"
_TEMPLATES = {"an endless template": ENDLESS, "a template of gigabytes": HUGE}
_PROMPTS: Sequence[Any] = ("sort: dcba =>", [1, 5, 9])
_REASON_MOST = 3000


@dataclass(frozen=True, slots=True)
class _Said:
    status: int
    content: Any
    headers: dict[str, str]

    @property
    def message(self) -> str:
        error = self.content.get("error") if isinstance(self.content, dict) else None
        return str(error["message"]) if isinstance(error, dict) else ""


class BadCheckpoints:
    """Of one phase. Not for two tries at a time."""

    def __init__(
        self, url: str, directory: Path, judge: Judge, findings: Findings, rng: random.Random
    ) -> None:  # fmt: skip
        """Checkpoints are made in `directory`, and gone after they were tried."""
        self._url, self._directory = url, directory
        self._judge, self._findings, self._rng = judge, findings, rng
        self._round = 0
        self._cases: Iterator[Case] = iter(())

    async def one(self) -> None:
        """Add one; if it is taken, ask it, and remove it."""
        what, entry = self._draw()
        timeout = aiohttp.ClientTimeout(total=_WITHIN_S)
        try:
            async with aiohttp.ClientSession(self._url, timeout=timeout) as session:
                await self._try(session, what, entry)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if not self._judge.draining:
                self._fault(what, "an answer", f"{type(error).__name__}: {error}", entry)
        finally:
            self._clear()

    # ---- what is added --------------------------------------------------------------------------

    def _draw(self) -> Case:
        if self._rng.random() < 0.1:
            return self._template()
        skipped = self._rng.randrange(_SKIPPED_MOST)
        case = next(islice(self._cases, skipped, None), None)
        while case is None:
            self._round += 1
            made = Generator(self._folder(), SPECIALISTS / _BASE, self._rng.getrandbits(32))
            self._cases = made.cases()
            case = next(islice(self._cases, skipped, None), None)
        return case

    def _folder(self) -> Path:
        folder = self._directory / f"round-{self._round}"
        folder.mkdir(parents=True)
        return folder

    def _template(self) -> Case:
        what = self._rng.choice(sorted(_TEMPLATES))
        path = self._directory / "template"
        shutil.copytree(SPECIALISTS / "sorter-llama", path)
        text = ON_REQUEST.replace("TEMPLATE", _TEMPLATES[what])
        (path / "chat_template.jinja").write_text(text)
        return what, {"id": "hostile-template", "path": str(path)}

    def _clear(self) -> None:
        """What is left of cases that were tried or skipped; a link may lead into itself."""
        for folder in (*self._directory.glob("round-*/hostile-*"), self._directory / "template"):
            shutil.rmtree(folder, ignore_errors=True)

    # ---- trying it ------------------------------------------------------------------------------

    async def _try(
        self, session: aiohttp.ClientSession, what: str, entry: dict[str, Any]
    ) -> None:  # fmt: skip
        said = await self._say(
            session, what, entry, "POST", "/admin/models", {201, 400, 503}, entry
        )
        self._findings.events[f"bad checkpoint: {said.status}"] += 1
        if said.status != 201:
            return
        name = quote(str(entry["id"]), safe="")
        for prompt in _PROMPTS:
            await self._ask(session, what, entry, {"prompt": prompt})
        if what in _TEMPLATES:
            await self._ask(session, what, entry, {"messages": [{"role": "user", "content": "x"}]})
        shown = await self._say(session, what, entry, "GET", f"/admin/models/{name}", {200})
        if shown.content.get("state") == "failed" and not shown.content.get("error"):
            self._fault(what, "a reason", shown.content, entry)
        await self._say(session, what, entry, "DELETE", f"/admin/models/{name}", {200})
        await self._say(session, what, entry, "GET", f"/admin/models/{name}", {404})

    async def _ask(
        self, session: aiohttp.ClientSession, what: str, entry: dict[str, Any],
        prompt: dict[str, Any],
    ) -> None:  # fmt: skip
        body = {"model": entry["id"], "temperature": 0, "max_tokens": 8, **prompt}
        allowed = {400} if what in _TEMPLATES and "messages" in prompt else {200, 400, 503}
        allowed.add(429)  # these models have the default target
        if "weights of" in what:  # it says what is wrong with the weights
            allowed.add(500)
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        said = await self._say(session, what, entry, "POST", path, allowed, body)
        self._judge.tally.left += said.status == 200
        self._findings.requests[f"bad checkpoint: {said.status}"] += 1

    async def _say(
        self, session: aiohttp.ClientSession, what: str, entry: dict[str, Any], method: str,
        path: str, allowed: set[int], body: object = None,
    ) -> _Said:  # fmt: skip
        began_s = session.loop.time()
        data = None if body is None else json.dumps(body).encode()
        json_type = {"content-type": "application/json"}
        async with session.request(method, path, data=data, headers=json_type) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            said = _Said(answer.status, json.loads(await answer.read()), headers)
        name = None if method == "GET" else str(entry["id"])
        allowed = allowed | self._judge.of_the_moment(name, began_s, session.loop.time())
        asked = f"{method} {path}"
        if said.status not in allowed:
            self._fault(f"{what}: {asked}", sorted(allowed), (said.status, said.message), entry)
        elif said.status >= 400:
            for fault in error_faults(said.status, said.content.get("error"), headers):
                self._fault(f"{what}: {asked}: {fault[0]}", fault[1], fault[2], entry)
            if "internal" in said.message or not 10 < len(said.message) < _REASON_MOST:
                self._fault(f"{what}: {asked}", "a reason", said.message[:1000], entry)
        return said

    def _fault(self, what: str, expected: object, came: object, entry: dict[str, Any]) -> None:
        shown = {"what": what, "came": came, "entry": str(entry)[:1000]}
        self._findings.violation("a bad checkpoint", expected, shown)

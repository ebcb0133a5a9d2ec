"""Whether an answer has the form the documentation promises: statuses, ends, usage, fields.

What it says is compared elsewhere (`comparing`). Every rule here is of docs/api.md or
docs/operations.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soak.case import Case, Reply, Said
from soak.findings import Findings
from soak.moments import Moments

NO_SLICE_GRACE_S = 30.0
"""How long requests wait while no slice is up, before 503 (`policy.cluster.admission`)."""
_LIVES = 4
"""Workers a request may lose before it fails."""
_LACK = re.compile(r"(?i)no space left|shared memory")
"""Of the reasons of 503 while the pool's filesystem is full, or has been."""
_ERROR_KEYS = {"message", "type", "param", "code"}

Fault = tuple[str, object, object]
"""Its name, what was expected, what came."""


@dataclass(slots=True)
class Tally:
    """Of one server: what its counters must show, of the models that stay."""

    ended: int = 0
    """Choices that ended with a stop or at their length."""
    left: int = 0
    """Choices whose client went away, or whose request failed: they may have ended as well."""
    output_tokens: int = 0
    """By the usage of whole answers, where it came."""


class Judge:
    def __init__(self, findings: Findings, moments: Moments) -> None:
        self._findings, self._moments = findings, moments
        self.tally = Tally()

    def judge(self, case: Case, reply: Reply) -> bool:
        """Whether all is as it must be; what is not becomes a violation."""
        self._findings.counted(case, reply)
        self._count(case, reply)
        faults = self._ending(case, reply)
        if not faults and reply.status == 200:
            faults = _answer(case, reply)
        elif not faults and reply.status is not None and not _unread(reply):
            faults = _refusal(case, reply)
        for name, expected, came in faults:
            self._findings.violation(name, expected, came, case, reply)
        return not faults

    def _count(self, case: Case, reply: Reply) -> None:
        if case.model is not None and self._moments.comes_and_goes(case.model.id):
            return
        if reply.complete:
            self.tally.ended += case.choices
            self.tally.output_tokens += (reply.usage or {}).get("completion_tokens", 0)
        else:
            self.tally.left += case.choices

    # ---- status and end -------------------------------------------------------------------------

    def _ending(self, case: Case, reply: Reply) -> list[Fault]:
        if reply.status is None and reply.end == "left":
            return []
        if reply.end in ("cut", "no end", "no connection"):
            return [(f"an answer's end: {reply.end}", "a whole answer", reply.detail)]
        allowed = self.allowed(case, reply)
        if reply.status not in allowed:
            return [("status", sorted(allowed), (reply.status, reply.error))]
        if reply.status == 503 and not _unread(reply) and not self._explained(case, reply):
            return [("a 503's reason", "the lack of room", reply.error)]
        if reply.end == "error event" and not allowed & {500, 503}:
            return [("an error in a stream", "[DONE]", reply.error)]
        return []

    def allowed(self, case: Case, reply: Reply) -> set[int]:
        """Statuses that the case may get, as of what happened meanwhile."""
        name = case.model and case.model.id
        return set(case.allowed) | self.of_the_moment(name, reply.sent_s, reply.ended_s)

    def _explained(self, case: Case, reply: Reply) -> bool:
        """Whether a 503 has another cause than a full filesystem, or says that this is it."""
        span = reply.sent_s, reply.ended_s
        if 503 in case.allowed or 503 in self._of_others(case.model and case.model.id, *span):
            return True
        return isinstance(reply.error, dict) and _LACK.search(str(reply.error)) is not None

    @property
    def draining(self) -> bool:
        return self._moments.draining_s < float("inf")

    def of_the_moment(self, model: str | None, begin_s: float, end_s: float) -> set[int]:
        """Statuses that any request may get that was under way then."""
        full = {503} if self._moments.full(begin_s, end_s) else set[int]()
        return full | self._of_others(model, begin_s, end_s)

    def _of_others(self, model: str | None, begin_s: float, end_s: float) -> set[int]:
        """The same, but for a full filesystem."""
        allowed: set[int] = set()
        if model is not None and self._moments.absent(model, begin_s, end_s):
            allowed.add(404)
        if self._moments.no_slice(begin_s, end_s, NO_SLICE_GRACE_S):
            allowed.add(503)
        if self._moments.all_back_off(begin_s, end_s):
            allowed.add(503)
        if end_s >= self._moments.draining_s:
            allowed.add(503)
        if self._moments.disturbances(begin_s, end_s) >= _LIVES:
            allowed.add(500)
        return allowed


def _unread(reply: Reply) -> bool:
    """Whether the client left between an error's status and its body."""
    return reply.end == "left" and reply.error is None


def _refusal(case: Case, reply: Reply) -> list[Fault]:
    error = reply.error
    faults = error_faults(reply.status or 0, error, reply.headers)
    if faults and faults[0][0] == "an error's shape":
        return faults
    code = {429: "rate_limit_exceeded", 404: "model_not_found"}.get(reply.status or 0)
    if reply.status in case.allowed and code is None:
        code = case.code
    if code is not None and error["code"] != code:
        faults.append(("an error's code", code, error))
    return faults + _identity(case, reply)


def error_faults(status: int, error: Any, headers: Mapping[str, str]) -> list[Fault]:
    """Of any refusal: its shape, and what only some statuses must have."""
    if not isinstance(error, dict) or set(error) != _ERROR_KEYS or not error["message"]:
        return [("an error's shape", sorted(_ERROR_KEYS), error)]
    if status in (429, 503) and not headers.get("retry-after", "").isdecimal():
        return [("Retry-After", "whole seconds", headers.get("retry-after"))]
    return []


def _identity(case: Case, reply: Reply) -> list[Fault]:
    came = reply.headers.get("x-request-id")
    return [] if came == case.id else [("x-request-id", case.id, came)]


# ---- a good answer -------------------------------------------------------------------------------


def _answer(case: Case, reply: Reply) -> list[Fault]:
    faults = _identity(case, reply)
    if not reply.headers.get("x-c2cserve-slice"):
        faults.append(("x-c2cserve-slice", "a slice", None))
    if not reply.complete:
        return faults
    if sorted(reply.choices) != list(range(case.choices)):
        return [*faults, ("choices", case.choices, sorted(reply.choices))]
    for said in reply.choices.values():
        faults += _said(case, said)
    wants_usage = not case.streamed or "stream_options" in case.body
    if reply.usage is not None:
        faults += _usage(case, reply)
    elif wants_usage:
        faults.append(("usage", "some", None))
    return faults


def _said(case: Case, said: Said) -> list[Fault]:
    if len(said.finishes) != 1 or said.finish not in ("stop", "length"):
        return [("finish_reason", "stop or length, once", said.finishes)]
    faults: list[Fault] = []
    may_stop = "stop" in case.body or "stop_token_ids" in case.body
    may_stop |= (
        case.model is not None and not case.model.numbers and not case.body.get("ignore_eos")
    )
    if said.finish == "stop" and not may_stop:
        faults.append(("finish_reason", "length", "stop"))
    for stop in case.body.get("stop", ()):
        if stop in _output_text(case, said):
            faults.append(("a stop string in the output", stop, said.text))
    count = drawn(case, said)
    if count is not None and said.finish == "length" and count != case.max_tokens:
        faults.append(("tokens of an answer", case.max_tokens, count))
    if count is not None and count > case.max_tokens:
        faults.append(("tokens of an answer", f"at most {case.max_tokens}", count))
    values = [one for one in said.logprobs if one is not None]
    if any(not -1e4 < one <= 1e-3 for one in values):
        faults.append(("a log-probability", "at most 0, a number", min(values)))
    return faults


def output_logprobs(case: Case, said: Said) -> list[float | None]:
    """Without those of an echoed prompt."""
    return said.logprobs[case.prompt_lens[0] :] if case.body.get("echo") else said.logprobs


def _output_text(case: Case, said: Said) -> str:
    """Without an echoed prompt, of models whose text is numbers."""
    if not case.body.get("echo"):
        return said.text
    return " ".join(said.text.split()[case.prompt_lens[0] :])


def drawn(case: Case, said: Said) -> int | None:
    """Tokens that a choice shows, where they can be counted."""
    if "logprobs" in case.body:
        return len(output_logprobs(case, said))
    if case.model is not None and case.model.numbers and "stop" not in case.body:
        return len(_output_text(case, said).split())
    return None


def _usage(case: Case, reply: Reply) -> list[Fault]:
    usage = reply.usage or {}
    cached: Any = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    prompt: Any = usage.get("prompt_tokens")
    output: Any = usage.get("completion_tokens")
    faults: list[Fault] = []

    def hold(holds: bool, expected: object) -> None:
        if not holds:
            faults.append(("usage", expected, usage))

    if not all(isinstance(value, int) for value in (prompt, output, cached)):
        return [("usage", "whole numbers", usage)]
    hold(usage.get("total_tokens") == prompt + output, "prompt and completion, added")
    hold(0 <= cached <= prompt and cached % 16 == 0, "whole cached blocks of the prompt")
    if case.prompt_lens:
        hold(prompt == sum(case.prompt_lens), f"{sum(case.prompt_lens)} prompt tokens")
    low, high = 0, 0
    for said in reply.choices.values():
        count = drawn(case, said)
        if said.finish == "length":
            low, high = low + case.max_tokens, high + case.max_tokens
        elif count is not None:  # a token that ended it counts and is not shown
            low, high = low + count, high + count + 1
        else:
            high += case.max_tokens
    hold(low <= output <= high, f"{low} to {high} completion tokens")
    return faults

"""Which request is most urgent (SLINFER section 6), and which model runs when not all can be in
time."""

from collections.abc import Iterable
from typing import TypeVar

from c2cserve.core.request import Request

Name = TypeVar("Name", str, int)

Candidate = tuple[float, int, Name]
"""A model that may run next: when its most urgent request's next token is due, the number of its
last step, its name."""

_PRIORITY_S = 1.0
"""A step of priority is worth so many seconds: high priority goes first, and nothing waits forever
behind it."""


def due_s(request: Request, tokens_out: int) -> float:
    """Return when the request's next token is late: SLINFER equation 1, headroom = arrival +
    TTFT_SLO + TPOT_SLO * tokens out - now, without the now and with priority (ours). `tokens_out`
    counts those before a resume too."""
    slo = request.slo
    lead_s = slo.ttft_s + slo.tpot_s * tokens_out - _PRIORITY_S * request.priority
    return request.arrival_s + lead_s


def next_turn(
    candidates: Iterable[Candidate[Name]], now: float, late_ran: bool
) -> tuple[bool, Name] | None:
    """Return which model runs next: whether it is late, and its name; None without candidates.

    While all are in time, the one with least headroom runs. Least headroom first fails under
    overload: the later a model is, the more it would get, until all others are late too. So late
    models take turns among themselves, and late and punctual models alternate (`late_ran`: the last
    step was a late model's). A punctual model gets at least every second step. A late one waits at
    most for twice the number of late models."""
    punctual: tuple[float, Name] | None = None
    late: tuple[int, Name] | None = None
    for due, last_step, name in candidates:
        if due >= now:
            if punctual is None or (due, name) < punctual:
                punctual = (due, name)
        elif late is None or (last_step, name) < late:
            late = (last_step, name)
    if late is not None and (punctual is None or not late_ran):
        return True, late[1]
    return None if punctual is None else (False, punctual[1])

"""How long a request may still wait before it misses its SLO (SLINFER section 6, equation 1)."""

from c2cserve.core.request import Request


def headroom_s(request: Request, tokens_out: int, now: float) -> float:
    """TTFT_SLO + TPOT_SLO * tokens out - elapsed: seconds until the next token is late; negative
    once it is. `tokens_out` counts tokens sent before a resume too."""
    due = request.arrival_s + request.slo.ttft_s + request.slo.tpot_s * tokens_out
    return due - now

"""What decisions believe about time, learned from what steps took.

A step of a model takes about `decode_s` (if it decodes) plus `prefill_token_s` per prefill token.
Both are exponential averages. (The simulator has its own cost model: what is believed and what
happens are never the same table.)
"""

from dataclasses import dataclass

_WEIGHT = 0.2
_PREFILL_TOKENS_MIN = 8
"""Shorter chunks say more about fixed costs than about the cost of a token."""


@dataclass(slots=True)
class StepTime:
    """0 means: nothing is known yet."""

    decode_s: float = 0.0
    prefill_token_s: float = 0.0

    def learn(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        if not prefill_tokens:
            self.decode_s = _blend(self.decode_s, took_s)
        elif prefill_tokens >= _PREFILL_TOKENS_MIN:
            rest_s = max(0.0, took_s - (self.decode_s if decodes else 0.0))
            self.prefill_token_s = _blend(self.prefill_token_s, rest_s / prefill_tokens)

    def chunk(self, decodes: int, allowed_s: float, least: int, most: int) -> int:
        """Prefill tokens that fit into a step of `allowed_s` beside the decodes."""
        if self.prefill_token_s <= 0.0:
            return most
        rest_s = allowed_s - (self.decode_s if decodes else 0.0)
        return max(least, int(min(most, rest_s / self.prefill_token_s)))


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)

"""What decisions believe about time, learned from what steps took.

A step takes about `decode_step_s(decodes) + prefill_token_s * prefill tokens`. Decode steps are
kept by powers of two of the batch (SLINFER section 6 B), with straight lines between them. All
values are exponential averages. (The simulator has its own cost model: what is believed and what
happens are never the same table.)"""

from dataclasses import dataclass, field

_WEIGHT = 0.2
_PREFILL_TOKENS_MIN = 8
"""Shorter chunks say more about fixed costs than about the cost of a token."""
_FIRST_CHUNK = 64
"""Prefill tokens of a model's first step, by which its speed becomes known."""
_AHEAD_MAX = 2.0
"""A request ahead of its pace may lose at most so many times its time per token in one step. A
client sees the gap, not the average."""


@dataclass(slots=True)
class StepTime:
    """One model on one slice. 0 means: nothing is known yet."""

    decode_s: float = 0.0
    """A decode step of the batch that was seen last: what the controller is told."""
    prefill_token_s: float = 0.0
    _by_batch: dict[int, float] = field(default_factory=dict[int, float])
    """floor(log2(batch)) -> seconds of a pure decode step."""
    _largest: int = -1
    """The largest of its keys."""

    def decode_step_s(self, batch: int) -> float:
        """Return the seconds of a pure decode step: interpolated between known batches, else those
        of the nearest known one."""
        samples = self._by_batch
        if not samples or batch < 1:
            return 0.0
        lower = batch.bit_length() - 1
        if lower in samples and batch == 1 << lower:
            return samples[lower]
        upper = lower + 1
        while lower >= 0 and lower not in samples:
            lower -= 1
        while upper <= self._largest and upper not in samples:
            upper += 1
        if lower < 0 or upper > self._largest:
            return samples[upper if lower < 0 else lower]
        share = (batch - (1 << lower)) / ((1 << upper) - (1 << lower))
        return samples[lower] + share * (samples[upper] - samples[lower])

    def knows(self, batch: int) -> bool:
        """Whether decode steps of about this size were seen."""
        return batch.bit_length() - 1 in self._by_batch

    def learn(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        if not prefill_tokens:
            size = decodes.bit_length() - 1
            took_s = _blend(self._by_batch.get(size, 0.0), took_s)
            self.decode_s = self._by_batch[size] = took_s
            self._largest = max(self._largest, size)
        elif prefill_tokens >= _PREFILL_TOKENS_MIN:
            # A step without decodes has its fixed cost too: about a decode step of one.
            rest_s = max(0.0, took_s - self.decode_step_s(max(1, decodes)))
            self.prefill_token_s = _blend(self.prefill_token_s, rest_s / prefill_tokens)

    def step_s(self, decodes: int, prefill_tokens: int) -> float:
        return self.decode_step_s(max(1, decodes)) + self.prefill_token_s * prefill_tokens

    def chunk(self, decodes: int, allowed_s: float, least: int, most: int) -> int:
        """Return the prefill tokens that fit into a step of `allowed_s` beside the decodes."""
        if self.prefill_token_s <= 0.0:
            return min(most, least if decodes else _FIRST_CHUNK)
        rest_s = allowed_s - self.decode_step_s(decodes)
        if rest_s <= 0.0:
            return least
        return max(least, int(min(most, rest_s / self.prefill_token_s)))


def allowed_step_s(headroom_s: float, tpot_s: float) -> float:
    """Return how long a step may take for the sake of one running request. That is its time per
    token if it is late or just in time, and longer if it is ahead."""
    return tpot_s * _AHEAD_MAX if headroom_s > tpot_s * _AHEAD_MAX else max(headroom_s, tpot_s)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)

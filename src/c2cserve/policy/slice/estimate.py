"""What decisions believe about time, learned from what steps took.

A step takes about `decode_step_s(decodes) + prefill_token_s * prefill tokens`. Decode steps are
kept by powers of two of the batch (SLINFER section 6 B), with straight lines between them.

Where a step waits for weights to cross a link, the arithmetic of a prompt may be hidden. Then a
prefill token takes 0 s, which is not the same as an unknown time.

A step may also do what is done once: register memory, capture a graph, compile. Then it takes a
hundred times as long as the next one, and says nothing about it. So each value comes from the last
few steps without the slowest. The controller gets none that only one step has shown: it would
refuse requests for it. (The simulator has its own cost model: what is believed and what happens are
never the same table.)"""

from dataclasses import dataclass, field

_STEPS = 5
"""A decode time comes from so many steps of its size."""
_PROMPTS_MOST = 16
_PROMPT_TOKENS = 4096
"""The time of a prefill token comes from so many tokens, in 5 to 16 steps. A short prompt takes
nearly as long as one of a few hundred tokens on a GPU, and must not outweigh that one."""
_PREFILL_TOKENS_MIN = 8
"""Shorter chunks say more about fixed costs than about the cost of a token."""
_FIRST_CHUNK = 64
"""Prefill tokens of a model's first step, by which its speed becomes known."""
_AHEAD_MAX = 2.0
"""A request ahead of its pace may lose at most so many times its time per token in one step. A
client sees the gap, not the average."""


@dataclass(slots=True)
class StepTime:
    """One model on one slice."""

    prefill_token_s: float = 0.0
    """0: nothing is known yet, or prompts took no longer than the decodes beside them."""
    _prompts: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """The last prefills: tokens, and seconds beside those of the decodes."""
    _decodes: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """floor(log2(batch)) -> seconds of the last decode steps."""
    _last: int = 0
    """The key of the last decode step's batch."""
    _by_batch: dict[int, float] = field(default_factory=dict[int, float])
    """floor(log2(batch)) -> seconds of a pure decode step."""
    _largest: int = -1
    """The largest of its keys."""
    _asked: int = -1
    _answer_s: float = 0.0
    """The batch that was asked for last, and its answer: one is asked for several times. -1: none
    since something was learned."""

    @property
    def knows_prompts(self) -> bool:
        """Whether `prefill_token_s` is known."""
        return self.prefill_token_s > 0.0 or bool(self._prompts)

    @property
    def settled(self) -> tuple[float, float] | None:
        """Return what the controller gets: the seconds of a decode step of the batch that was
        seen last, and of a prefill token. None: only one step has shown it, or none."""
        if len(self._decodes.get(self._last, ())) < 2 or len(self._prompts) < 2:
            return None
        return self._by_batch[self._last], self.prefill_token_s

    def decode_step_s(self, batch: int) -> float:
        """Return the seconds of a pure decode step: interpolated between known batches, else those
        of the nearest known one."""
        if batch != self._asked:
            self._asked, self._answer_s = batch, self._decode_step_s(batch)
        return self._answer_s

    def _decode_step_s(self, batch: int) -> float:
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
            size = self._last = decodes.bit_length() - 1
            steps = self._decodes.get(size)
            if steps is None:
                steps = self._decodes[size] = []
            steps.append(took_s)
            if len(steps) > _STEPS:
                del steps[0]
            self._by_batch[size] = _typical(steps)
            self._largest = max(self._largest, size)
            self._asked = -1
        elif prefill_tokens >= _PREFILL_TOKENS_MIN:
            # A step without decodes has its fixed cost too: about a decode step of one.
            rest_s = max(0.0, took_s - self.decode_step_s(max(1, decodes)))
            self._prompts.append((prefill_tokens, rest_s))
            self.prefill_token_s = _token_s(self._prompts)

    def step_s(self, decodes: int, prefill_tokens: int) -> float:
        return self.decode_step_s(max(1, decodes)) + self.prefill_token_s * prefill_tokens

    def chunk(self, decodes: int, allowed_s: float, least: int, most: int) -> int:
        """Return the prefill tokens that fit into a step of `allowed_s` beside the decodes.

        While prompts have cost nothing, each chunk may be twice as large as the largest of them."""
        if self.prefill_token_s <= 0.0:
            free = max([tokens for tokens, _ in self._prompts], default=0)
            return min(most, max(2 * free, least if decodes else _FIRST_CHUNK))
        rest_s = allowed_s - self.decode_step_s(decodes)
        if rest_s <= 0.0:
            return least
        return max(least, int(min(most, rest_s / self.prefill_token_s)))


def allowed_step_s(headroom_s: float, tpot_s: float) -> float:
    """Return how long a step may take for the sake of one running request. That is its time per
    token if it is late or just in time, and longer if it is ahead."""
    return tpot_s * _AHEAD_MAX if headroom_s > tpot_s * _AHEAD_MAX else max(headroom_s, tpot_s)


def _typical(steps: list[float]) -> float:
    """Return the mean of a few times without the longest and the shortest; of two the shorter. (Of
    two steps that are noticed at once, the second seems to take no time.)"""
    total, shortest, longest = 0.0, steps[0], steps[0]
    for one in steps:
        total += one
        if one < shortest:
            shortest = one
        elif one > longest:
            longest = one
    count = len(steps)
    return shortest if count < 3 else (total - longest - shortest) / (count - 2)


def _token_s(prompts: list[tuple[int, float]]) -> float:
    """Return the seconds per token of the last prefills, without the slowest. Forget older ones."""
    total = 0
    for tokens, _ in prompts:
        total += tokens
    while len(prompts) > _PROMPTS_MOST or (
        len(prompts) > _STEPS and total - prompts[0][0] >= _PROMPT_TOKENS
    ):
        total -= prompts[0][0]
        del prompts[0]
    took_s, slowest_tokens, slowest_s, most = 0.0, 0, 0.0, -1.0
    for tokens, seconds in prompts:
        took_s += seconds
        each_s = seconds / tokens
        if each_s > most:
            slowest_tokens, slowest_s, most = tokens, seconds, each_s
    if len(prompts) > 1:
        total, took_s = total - slowest_tokens, took_s - slowest_s
    return max(0.0, took_s) / total

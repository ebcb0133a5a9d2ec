"""Would a slice still keep all targets with one request more? (SLINFER section 6 C)

The request is added virtually, and the slice's next iterations are played through in virtual time,
each 10 % longer than believed. The instance with least headroom runs: a prompt alone, a batch's
decode step together. The play ends when all prompts have had their turn, and every instance a
decode step after the last of them. Figure 15's violations:

  1  the newcomer's first token comes after its deadline;
  2  a request that was in time is late because of the newcomer's prefill;
  3  one decode step of every instance together takes longer than the time per token.

Ours, and the published rule lacks it: prompts to come also take time of a round. A request brings
one prompt and as many decode steps as its answer has tokens. So beside a request, on a slice of `n`
whose requests are replaced by others like them, each round computes prompts for

    (n - 1) * mean prompt seconds / mean output tokens

Without that, full slices have no time left for prompts.

Requests that were late before do not count: refusing the newcomer would not help them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from c2cserve.policy.cluster.quantify import OVERESTIMATE, Times

_NEVER_S = float("inf")


@dataclass(slots=True)
class Prompt:
    """A request without its first token: when that is due, and what has to be computed for it."""

    due_s: float
    tokens: int
    tpot_s: float
    newcomer: bool = False


@dataclass(slots=True)
class Shadow:
    """An instance as it is played through. All due times are absolute."""

    times: Times
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    """Most urgent first."""
    batch: int = 0
    tokens: float = 0.0
    """Tokens of the sequences that decode, together."""
    due_s: float = _NEVER_S
    """When the most urgent of them needs its next token."""
    tpot_s: float = _NEVER_S
    """The shortest time per token among them."""
    decoded: bool = False
    prompts_s: float = 0.0
    """Seconds that the prompts of the sequences that decode have taken."""
    mean_output: float = _NEVER_S
    """Tokens of the model's answers."""

    def decode_s(self) -> float:
        return self.times.decode_s(self.batch, self.tokens / self.batch) if self.batch else 0.0

    def joined(self, prompt: Prompt) -> None:
        """The prompt is computed: it decodes with the others from now on."""
        self.batch += 1
        self.tokens += prompt.tokens + 1
        self.due_s = min(self.due_s, prompt.due_s + prompt.tpot_s)
        self.tpot_s = min(self.tpot_s, prompt.tpot_s)

    def most_urgent_s(self) -> float:
        return min(self.due_s, self.prompts[0].due_s) if self.prompts else self.due_s


def round_fits(shadows: Iterable[Shadow]) -> bool:
    """Not case 3, with all prompts counted as if they decoded already, and prompts to come."""
    round_s, tpot_s = 0.0, _NEVER_S
    requests, outputs, prompts_s = 0, 0.0, 0.0
    for one in shadows:
        batch = one.batch + len(one.prompts)
        if not batch:
            continue
        tokens = one.tokens + sum(prompt.tokens for prompt in one.prompts)
        round_s += one.times.decode_s(batch, tokens / batch)
        tpot_s = min(tpot_s, one.tpot_s, *(prompt.tpot_s for prompt in one.prompts))
        requests += batch
        outputs += batch * one.mean_output
        prompts_s += one.prompts_s + sum(one.times.prefill_s(each.tokens) for each in one.prompts)
    if requests > 1:
        round_s += (requests - 1) * prompts_s / max(1.0, outputs)
    return OVERESTIMATE * round_s <= tpot_s


def in_time(shadows: Sequence[Shadow], now: float) -> bool:
    """Neither case 1 nor case 2; uses the shadows up. It ends because case 3 was excluded: decode
    steps gain more headroom than they take time, so every prompt has its turn."""
    prompts = sum(len(one.prompts) for one in shadows)
    while True:
        left = [one for one in shadows if one.prompts or (one.batch and not one.decoded)]
        if not left:
            return True
        able = [one for one in shadows if one.prompts or one.batch] if prompts else left
        able.sort(key=Shadow.most_urgent_s)
        one = able[0]
        started = now
        if one.prompts:
            prompt = one.prompts.pop(0)
            prompts -= 1
            now += OVERESTIMATE * one.times.prefill_s(prompt.tokens)
            if now > prompt.due_s and (prompt.newcomer or started <= prompt.due_s):
                return False
            one.joined(prompt)
            for other in shadows:
                other.decoded = False
        else:
            step_s = OVERESTIMATE * one.decode_s()
            if started <= one.due_s < started + step_s:
                return False
            ahead_s = able[1].most_urgent_s() - one.due_s if prompts and len(able) > 1 else 0.0
            # It stays the most urgent for so many steps: play them at once.
            steps = 1 + int(ahead_s / one.tpot_s)
            now += steps * step_s
            one.due_s += steps * one.tpot_s
            one.decoded = True

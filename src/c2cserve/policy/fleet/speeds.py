"""How fast the nodes of one kind and price compute models, from what they announce."""

from dataclasses import dataclass, field

from c2cserve.core.fleet import Speed
from c2cserve.core.model import ModelSpec

PROMPT_TOKEN_S = 1e-4
"""What a prompt token is believed to cost until nodes have answered."""
_LEARNING = 0.2
"""Weight of a new sample that is slower than what was believed."""
_NEWEST = 0.05
"""Weight of the newest first token of all nodes."""
_BELIEVED_S = 600.0
"""What was measured longer ago than this is forgotten: then such a node may be tried again."""


@dataclass(slots=True)
class _Belief:
    prompt_token_s: float
    token_s: float
    at_s: float
    step_bytes: float

    def learn(self, speed: Speed, now: float) -> None:
        """A faster sample counts whole, a slower one in part. A step takes longer beside others,
        and that says little of what the next one takes on an idle node."""
        self.prompt_token_s += _part(speed.prompt_token_s - self.prompt_token_s)
        self.token_s += _part(speed.token_s - self.token_s)
        self.at_s = now


def _part(change_s: float) -> float:
    return change_s if change_s < 0.0 else _LEARNING * change_s


@dataclass(slots=True)
class Speeds:
    """Shared by the nodes of one kind and price."""

    prompt_token_s: float = PROMPT_TOKEN_S
    """What a prompt token cost lately, of any model on any of the nodes."""
    _samples: int = 0
    """First tokens that it was learned from."""
    _models: dict[str, _Belief] = field(default_factory=dict[str, _Belief])

    def learn(self, prompt_token_s: float) -> None:
        """Learn from a node's first token."""
        self._samples += 1
        change_s = prompt_token_s - self.prompt_token_s
        self.prompt_token_s += max(_NEWEST, 1.0 / self._samples) * change_s

    def note(self, speed: Speed, spec: ModelSpec, now: float) -> None:
        """Note what a node has measured."""
        if not self._samples:
            self.prompt_token_s = max(self.prompt_token_s, speed.prompt_token_s)
        belief = self._models.get(spec.id)
        if belief is None or now - belief.at_s > _BELIEVED_S:
            self._models[spec.id] = _Belief(
                speed.prompt_token_s, speed.token_s, now, spec.step_bytes(1)
            )
        else:
            belief.learn(speed, now)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def of(self, spec: ModelSpec, now: float) -> tuple[float, float]:
        """Return the seconds for a prompt token, and for a decode step.

        A model that was not computed there takes as long for a byte as others did. Where nothing
        was measured lately both are 0: so such nodes are tried, the cheapest first."""
        own = self._models.get(spec.id)
        if own is not None and now - own.at_s <= _BELIEVED_S:
            return own.prompt_token_s, own.token_s
        others = [one for one in self._models.values() if now - one.at_s <= _BELIEVED_S]
        size = sum(one.step_bytes for one in others)
        if not size:
            return 0.0, 0.0
        share = spec.step_bytes(1) / size
        return (
            share * sum(one.prompt_token_s for one in others),
            share * sum(one.token_s for one in others),
        )

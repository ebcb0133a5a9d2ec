"""Which weights are copied into memory that neighbouring GPUs lend (ours, DESIGN "Pool").

A neighbour's HBM is read several times as fast as host memory, so what lies there is a second home.
Models come in pieces (runs of tensors), hottest model first. While there is room, all pieces are
taken; then those worth clearly more than what goes for them (`policy.weights.hbm_residency`).
Models without requests come last, in the order they came into the pool."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from c2cserve.policy.weights.hbm_residency import Residency


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A piece to copy next."""

    model: str
    key: Hashable
    victims: tuple[Hashable, ...]
    """Pieces whose places it takes: gone from here on."""


class Lending:
    """Books of what lies in lent memory. Deterministic; `now` never falls."""

    def __init__(self, budget_bytes: int) -> None:
        self._books = Residency(budget_bytes)
        self._models: dict[str, dict[Hashable, int]] = {}
        """Sizes of each model's pieces that are not there, in the order they are used."""
        self._there: dict[Hashable, tuple[str, int]] = {}
        self._refused: dict[Hashable, tuple[str, int]] = {}

    def add(self, model: str, sizes: Mapping[Hashable, int]) -> None:
        """All of the model is in the pool."""
        self._models[model] = dict(sizes)

    def used(self, model: str, now: float) -> None:
        """A step of the model runs."""
        if model in self._models:
            self._books.used(model, now)

    def next(self, now: float) -> PieceCopy | None:
        """The piece to copy now, entered into the books; None: all is as it should be."""
        order = sorted(self._models, key=lambda model: -self._books.worth(model, now))
        for model in order:
            missing = self._models[model]
            if not missing:
                continue
            key = next(iter(missing))
            victims = self._books.admit(model, key, missing[key], now)
            if victims is None:
                continue  # its other pieces are worth no more
            self._there[key] = (model, missing.pop(key))
            for victim in victims:
                self._miss(victim, self._there.pop(victim))
            if victims:
                self._retry()
            return PieceCopy(model, key, tuple(victims))
        return None

    def refuse(self, key: Hashable) -> None:
        """There is room for the piece of the last turn, but in places too small: not again before
        something has gone."""
        self._books.drop(key)
        self._refused[key] = self._there.pop(key)

    def remove(self, model: str) -> tuple[Hashable, ...]:
        """The model leaves the pool. Returns its pieces that were there."""
        self._models.pop(model, None)
        self._refused = {k: one for k, one in self._refused.items() if one[0] != model}
        self._books.forget(model)
        gone = tuple(key for key, (owner, _) in self._there.items() if owner == model)
        for key in gone:
            del self._there[key]
        if gone:
            self._retry()
        return gone

    def _miss(self, key: Hashable, piece: tuple[str, int]) -> None:
        model, size = piece
        self._models[model][key] = size

    def _retry(self) -> None:
        for key, piece in self._refused.items():
            self._miss(key, piece)
        self._refused.clear()

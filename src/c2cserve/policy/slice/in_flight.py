"""Steps of a slice between their launch and their end."""

from collections.abc import Iterable, Iterator

from c2cserve.policy.slice.batching import ActiveModel, Flight

_LEAD_S = 0.02
"""How long before the end of a step the next one is planned. It hides the planning and launching
of a step, and the word that the last one is done; but who comes after it waits for a step more."""


class Flights:
    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self.flying = 0
        """Those that are not parked."""

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def __len__(self) -> int:
        return len(self._flights)

    def launched(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self._flights[flight.step.id] = flight
            self.flying += 1

    def landed(self, step_id: int) -> Flight:
        flight = self._flights.pop(step_id)
        self.flying -= not flight.parked
        return flight

    def park(self, step_id: int) -> None:
        flight = self._flights[step_id]
        self.flying -= not flight.parked
        flight.parked = True

    def of(self, model: ActiveModel) -> list[Flight]:
        return [flight for flight in self if flight.model is model]

    def parked(self, model: ActiveModel) -> bool:
        return any(flight.parked for flight in self.of(model))

    def models(self) -> set[str]:
        return {flight.model.name for flight in self}

    def next_plan_s(self, now: float) -> float:
        """When the next step is due to be planned: at once if nothing runs, or else when what runs
        is about to end: until then, who comes can still have a part in it. While nobody knows how
        long steps take, there is nothing to hide, and what comes is the end of the step."""
        ahead = next((flight for flight in self if not flight.parked), None)
        if ahead is None:
            return now
        if ahead.since_s is None:
            ahead.since_s = now
        if not ahead.expected_s:
            return float("inf")
        return ahead.since_s + ahead.expected_s - _LEAD_S

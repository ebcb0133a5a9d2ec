"""Workloads from a few numbers: `rate=5,duration=600,sources=64,zipf=1,cv=1,prompt=512,output=128`.

Arrivals of all sources together are a renewal process with Gamma gaps of coefficient of variation
`cv`. Sources follow Zipf's law. Lengths are exponential around their means, or sampled from a
dataset if `prompt` is not given.
"""

from random import Random

from c2cserve.sim.workload.rows import Row, TraceError

_DEFAULTS = {
    "rate": 5.0, "duration": 600.0, "sources": 64.0, "zipf": 1.0, "cv": 1.0,
    "prompt": 0.0, "output": 0.0,
}  # fmt: skip


def synthetic(text: str, seed: int, scale: float = 1.0) -> list[Row]:
    """Sample the requests that `text` describes, at `scale` times its rate. Raises TraceError."""
    values = dict(_DEFAULTS)
    for term in filter(None, text.split(",")):
        key, _, value = term.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError as error:
            raise TraceError(f"{term!r} is not KEY=NUMBER") from error
    unknown = values.keys() - _DEFAULTS.keys()
    if unknown:
        raise TraceError(f"no key {min(unknown)!r}; there are {', '.join(_DEFAULTS)}")
    if min(values["rate"], values["duration"], values["sources"], values["cv"]) <= 0:
        raise TraceError("rate, duration, sources and cv must be greater than 0")
    values["rate"] *= scale
    return _rows(values, Random(f"{seed}/synthetic"))


def _rows(values: dict[str, float], random: Random) -> list[Row]:
    weights = [1 / (rank + 1) ** values["zipf"] for rank in range(int(values["sources"]))]
    names = [str(rank) for rank in range(len(weights))]
    shape = 1 / values["cv"] ** 2
    scale = 1 / (values["rate"] * shape)
    times: list[float] = []
    t_s = 0.0
    while (t_s := t_s + random.gammavariate(shape, scale)) < values["duration"]:
        times.append(t_s)
    chosen = random.choices(names, weights, k=len(times))
    return [
        Row(t_s, name, _length(random, values["prompt"]), _length(random, values["output"]))
        for t_s, name in zip(times, chosen, strict=True)
    ]


def _length(random: Random, mean: float) -> int:
    return 1 + int(random.expovariate(1 / mean)) if mean > 0 else 0

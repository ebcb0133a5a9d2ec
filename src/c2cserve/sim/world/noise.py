"""How step times spread, log-normal."""

from math import exp, log, sqrt
from random import Random

_MAGIC = 4.0 * exp(-0.5) / sqrt(2.0)


def spread_of(random: Random, sigma: float) -> float:
    """Return `random.lognormvariate(0.0, sigma)` to the bit, by the same method (Kinderman and
    Monahan). The library's is interpreted, and was a fiftieth of compiled simulations."""
    uniform = random.random
    while True:
        above, below = uniform(), 1.0 - uniform()
        z = _MAGIC * (above - 0.5) / below
        if z * z / 4.0 <= -log(below):
            return exp(z * sigma)

"""How long steps of hybrid GEMMs take, by the machine's profile (C2CServe section 6.3)."""

from collections.abc import Iterator

from c2cserve.core.events import ChunkCost
from c2cserve.core.tensors import HalfDtype, Home
from c2cserve.engine.models.config import ModelConfig
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser, Estimate
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.published.algorithm1 import served_tiles

_CHUNK_LEAST = 16


def chunk_costs(
    chooser: Chooser, config: ModelConfig, dtype: HalfDtype, home: Home, sms: int, alpha: float,
    most: int,
) -> tuple[ChunkCost, ...]:  # fmt: skip
    """Return what steps of 16, 32 ... `most` prompt tokens take on `sms` SMs, W at `home`.

    As in the paper, GEMMs stand for the step. Raises `ProfileMismatch` for a home
    that the profile does not have.
    """
    sizes = [most >> power for power in range(most.bit_length()) if most >> power >= _CHUNK_LEAST]
    found: list[ChunkCost] = []
    for rows in sorted(sizes or [most]):
        step_s = hbm_s = 0.0
        for count, n, k, experts, top_k in _matrices(config):
            question = Question(rows, n, k, dtype, home, sms, experts, top_k)
            one = _estimate(chooser, question, alpha)
            step_s += count * one.predicted_s
            hbm_s += count * one.terms.hbm_s
        found.append(ChunkCost(rows, step_s, hbm_s))
    return tuple(found)


def _estimate(chooser: Chooser, question: Question, alpha: float) -> Estimate:
    if question.experts or question.k % 8:
        return chooser.estimates(question)[0]
    tiles = served_tiles(question.dtype, question.m, alpha)
    return chooser.estimate(question, "hybrid", tiles)


def _matrices(config: ModelConfig) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (count, N, K, experts, chosen experts) of a model's kinds of matrices. Its head is left
    out: only a prompt's last row is multiplied with it."""
    sparse = sum(config.sparse(layer) for layer in range(config.layers))
    wide = config.heads * config.head_dim
    yield config.layers, wide + 2 * config.kv_heads * config.head_dim, config.hidden, 0, 0
    yield config.layers, config.hidden, wide, 0, 0
    if dense := config.layers - sparse:
        yield dense, 2 * config.intermediate, config.hidden, 0, 0
        yield dense, config.hidden, config.intermediate, 0, 0
    if sparse and (moe := config.moe) is not None:
        yield sparse, moe.experts, config.hidden, 0, 0
        yield sparse, 2 * moe.intermediate, config.hidden, moe.experts, moe.per_token
        yield sparse, config.hidden, moe.intermediate, moe.experts, moe.per_token

"""Filters over a large vocabulary against their definition; penalties against a plain oracle."""

import math
from dataclasses import replace

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import EVERY_LEVEL

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import RowSampling

VOCAB = 3001


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(1)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept(logits: torch.Tensor, temperature: float, k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that survive min_p, then top_k, then top_p, by sorting everything in float64."""
    p = ((logits.double() - logits.max()) / temperature).exp()
    p[p < min_p] = 0
    order = p.argsort(descending=True, stable=True)
    if k:
        p[order[k:]] = 0
    mass = p[order].cumsum(0) - p[order]
    p[order[mass >= top_p * p.sum()]] = 0
    return set(p.nonzero()[:, 0].tolist())


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    k=st.sampled_from([0, 1, 3, 200]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_draws_stay_within_what_the_filters_keep(
    seed: int, spread: float, temperature: float, k: int, top_p: float, min_p: float
) -> None:
    logits = noise(VOCAB, seed=seed) * spread
    want = kept(logits, temperature, k, top_p, min_p)
    rows = [
        RowSampling(seed, i, temperature=temperature, top_k=k, top_p=top_p, min_p=min_p)
        for i in range(400)
    ]
    got = set(CpuOps(1).sample(logits.expand(400, -1).contiguous(), rows).ids)
    # Float32 sums may put the border one token further.
    assert len(got - want) <= 1
    if len(want) <= 8:
        p = ((logits.double() - logits.max()) / temperature).exp()
        likely = {i for i in want if p[i] / p[list(want)].sum() > 0.1}
        assert likely <= got, "a token of a tenth of the mass is drawn within 400 times"


def test_ties_at_the_border_of_top_k_go_to_the_lowest_ids(ops: CpuOps) -> None:
    logits = torch.zeros(1, VOCAB)
    rows = [RowSampling(1, i, top_k=3) for i in range(300)]
    assert set(ops.sample(logits.expand(300, -1).contiguous(), rows).ids) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e-42, 1e-6])
def test_a_tiny_temperature_is_greedy(ops: CpuOps, temperature: float) -> None:
    logits = noise(1, VOCAB, seed=3)
    drawn = ops.sample(logits, [RowSampling(1, 1, temperature=temperature)])
    assert drawn.ids == [int(logits.argmax())]


def test_uniform_draws_over_the_whole_vocabulary(ops: CpuOps) -> None:
    count = 30_000
    rows = [RowSampling(9, i) for i in range(count)]
    ids = torch.tensor(ops.sample(torch.zeros(count, 100), rows).ids)
    seen = torch.bincount(ids, minlength=100).double()
    chi2 = float(((seen - count / 100) ** 2 / (count / 100)).sum())
    assert chi2 < 99 + 5 * math.sqrt(2 * 99)


@settings(max_examples=examples(40), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 30), max_size=20),
    output=st.lists(st.integers(0, 30), max_size=20),
    repetition=st.sampled_from([1.0, 0.7, 1.8]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.3, 0.8]),
    bias=st.dictionaries(st.integers(0, 30), st.floats(-5, 5, width=32), max_size=4),
    banned=st.sets(st.integers(0, 30), max_size=8),
)
def test_penalties(
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    banned: set[int],
) -> None:
    logits = noise(31, seed=len(prompt) + 31 * len(output)) * 2
    want = logits.double()
    for token, value in bias.items():
        want[token] += value
    for token in {*prompt, *output}:
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(output):
        want[token] -= presence + frequency * output.count(token)
    ints = [torch.tensor(list(x), dtype=torch.int32) for x in (prompt, output, bias)]
    row = RowSampling(
        1, 0, 0.0, repetition=repetition, presence=presence, frequency=frequency, prompt=ints[0],
        output=ints[1], bias_ids=ints[2], bias=torch.tensor(list(bias.values())), top_logprobs=2,
    )  # fmt: skip
    raw, ranking = logits.double().log_softmax(0), list[int]()
    while True:  # the whole order of the adjusted logits, by banning the best again and again
        out = torch.tensor([*banned, *ranking], dtype=torch.int32)
        drawn = CpuOps(1).sample(logits[None], [replace(row, banned=out)])
        if drawn.ids[0] < 0:
            break
        ranking.append(drawn.ids[0])
        assert drawn.logprobs[0] == pytest.approx(float(raw[ranking[-1]]), abs=1e-5)
        assert drawn.top[0][0][0] == int(logits.argmax()), "log-probabilities are of raw logits"
    assert sorted(ranking) == sorted(set(range(31)) - banned)
    assert (want[ranking].diff() < 1e-5).all()


def test_a_row_with_every_token_banned_says_so(ops: CpuOps) -> None:
    every = torch.arange(50, dtype=torch.int32)
    rows = [RowSampling(1, 0, temperature=t, banned=every) for t in (0.0, 1.0)]
    assert ops.sample(noise(2, 50), rows).ids == [-1, -1]


def test_philox_is_the_published_generator(ops: CpuOps) -> None:
    """Random123's known answer for counter 0, key 0: the first two words are the 53 bits drawn."""
    first, second = 0x6627E8D5, 0xE169C58D
    share = ((first << 21) ^ (second >> 11)) / 2**53
    drawn = ops.sample(torch.zeros(1, 4096), [RowSampling(0, 0)]).ids[0]
    assert drawn == int(share * 4096)


def test_one_seed_is_not_another(ops: CpuOps) -> None:
    logits = torch.zeros(200, VOCAB)
    by_seed = ops.sample(logits, [RowSampling(i, 0) for i in range(200)]).ids
    by_position = ops.sample(logits, [RowSampling(0, i) for i in range(200)]).ids
    assert len(set(by_seed)) > 180
    assert len(set(by_position)) > 180
    assert by_seed != by_position


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_only_what_a_mask_allows_is_drawn(ops: CpuOps, way: dict[str, float]) -> None:
    """Filters apply to what the mask leaves, and log-probabilities are those of all logits."""
    allowed = [3, 31, 32, 3000]
    mask = torch.zeros(94, dtype=torch.int32)
    for token in allowed:
        mask[token // 32] |= -(1 << 31) if token % 32 == 31 else 1 << token % 32
    logits = noise(1, VOCAB, seed=3) * 3
    rows = [RowSampling(1, i, top_logprobs=0, mask=mask, **way) for i in range(300)]  # pyright: ignore[reportArgumentType]
    got = ops.sample(logits.expand(300, -1).contiguous(), rows)
    assert set(got.ids) <= set(allowed)
    whole = logits.double().log_softmax(-1)[0]
    assert got.logprobs == pytest.approx([float(whole[i]) for i in got.ids], abs=1e-5)
    best = max(allowed, key=lambda token: float(logits[0, token]))
    assert best in got.ids
    if way == {"temperature": 0.0}:
        assert set(got.ids) == {best}


def allowed_tokens(kind: str, vocab: int) -> torch.Tensor:
    """Return a bool for each token: true in a share of random places, or in alternating blocks
    whose borders are not those of words."""
    if kind == "blocks":
        return torch.arange(vocab) // 150 % 2 == 0
    share = {"none": 0.0, "few": 0.002, "half": 0.5, "most": 0.998, "all": 1.0}[kind]
    generator = torch.Generator().manual_seed(vocab)
    return torch.rand(vocab, generator=generator) < share


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """Return the words of a mask. Bits behind the vocabulary are set: they must not matter."""
    bits = torch.ones(-(-len(allowed) // 32) * 32, dtype=torch.int64)
    bits[: len(allowed)] = allowed.long()
    return (bits.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


@pytest.mark.parametrize("isa", EVERY_LEVEL)
@pytest.mark.parametrize("vocab", [50, 64, 3001, 3008, 3030])
@pytest.mark.parametrize("kind", ["none", "few", "half", "most", "all", "blocks"])
def test_a_mask_is_a_ban_of_each_token_that_it_forbids(isa: str, vocab: int, kind: str) -> None:
    """Bans are applied token by token. The draws are the same ones, with every filter."""
    allowed = allowed_tokens(kind, vocab)
    masked = RowSampling(5, 0, mask=packed(allowed))
    banned = RowSampling(5, 0, banned=(~allowed).nonzero()[:, 0].int())
    ways: list[dict[str, float]] = [
        {"temperature": 0.0}, {}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.7},
        {"min_p": 0.1}, {"presence": 1.0},
    ]  # fmt: skip
    output = torch.arange(0, vocab, 7, dtype=torch.int32)
    logits = noise(1, vocab, seed=vocab).expand(20 * len(ways), -1).contiguous()

    def draws(row: RowSampling) -> list[int]:
        rows = [
            replace(row, position=i, output=output, **way)  # pyright: ignore[reportArgumentType]
            for way in ways
            for i in range(20)
        ]
        return CpuOps(1, isa=isa).sample(logits, rows).ids

    got = draws(masked)
    assert got == draws(banned)
    assert all(allowed[token] for token in got) if allowed.any() else set(got) == {-1}


def test_a_mask_of_another_vocabulary_is_refused(ops: CpuOps) -> None:
    mask = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="a mask of 3 words for 3001 tokens"):
        ops.sample(noise(1, VOCAB), [RowSampling(0, 0, mask=mask)])

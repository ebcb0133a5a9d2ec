"""The decoder over the GPU's operators, Triton interpreted, GEMMs in plain torch: logits next to
transformers' own error, and an executor that says what the CPU's says."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from interpreted import DEVICE
from lane import GREEDY, Lane, LateModel
from published import PUBLISHED
from tiny import CASES, COMMON, Ours, make_model
from torch import Tensor
from transformers import PreTrainedModel

from c2cserve.core.events import StepParked
from c2cserve.core.request import FinishReason, Sampling
from c2cserve.engine.gpu import layers
from c2cserve.engine.gpu.layers import handle_of
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.engine.gpu.sampling import Sampler
from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.layout import EMBED, HEAD, plan_layout
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.elementwise import silu_mul
from c2cserve.kernels.gpu.gemm.long_rows import MatrixShape
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.ops import RowSampling, SampledTokens

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="tests/gpu has the like on real kernels"
)

PROMPT = torch.randint(3, 160, (19,), generator=torch.Generator().manual_seed(5)).tolist()
DRAWN = Sampling(seed=3, temperature=0.8, top_p=0.9)


class PlainMultiply:
    """`Linear`'s contract on the host: rounded once."""

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        assert isinstance(w.owner, Tensor)
        assert x.dtype is w.owner.dtype
        assert bias is None or bias.dtype is x.dtype
        y = x.float() @ w.owner.float().T
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        return silu_mul(self(x, w, bias))

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        assert isinstance(w.owner, Tensor)
        assert x.shape[0] % top_k == 0
        bounds = pairwise(offsets.tolist())
        parts = [
            x[a:b].float() @ one.float().T for one, (a, b) in zip(w.owner, bounds, strict=True)
        ]
        return torch.cat(parts).to(x.dtype)


def gpu_ops() -> GpuOps:
    return GpuOps(PlainMultiply(), DEVICE, CpuOps(1).sample)


def rms(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).square().mean().sqrt())


def make(directory: Path, case: str, dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    """Of two layers and four heads: the interpreter is slow."""
    name, overrides = CASES[case]
    fields = {**COMMON, **overrides, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields["num_key_value_heads"] = min(4, fields["num_key_value_heads"])
    return make_model(directory, name, fields, 1, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("llama-mha-tied-bias", torch.bfloat16),
        ("qwen2-window", torch.float16),
        ("qwen3-moe", torch.bfloat16),
    ],
)
def test_as_near_to_the_truth_as_transformers(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    model = make(tmp_path, case, dtype)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
        exact = model.float()(torch.tensor([PROMPT])).logits[0]
    ours = Ours(tmp_path, ops=gpu_ops())
    whole, _ = ours.step([(0, PROMPT, 0), (1, PROMPT[:2], 0)])
    # The interpreter cuts bfloat16 off where a GPU rounds: twice the error.
    allowed = 1.3 if dtype is torch.float16 else 2.6
    assert rms(whole, exact) < allowed * rms(theirs, exact)
    for step, (begin, end) in enumerate(pairwise([0, 7, 18, 19])):
        part, beside = ours.step([(2, PROMPT[begin:end], begin), (1, [7], 2 + step)])
        assert rms(part, exact[begin:end]) < 1.5 * allowed * rms(theirs, exact)
        assert not beside.isnan().any()


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_the_executor_answers_as_on_cpus(tmp_path: Path, case: str) -> None:
    """Greedy and drawn requests in one batch, beside one whose log-probabilities are wanted."""
    make(tmp_path, case)
    answers: list[dict[str, list[int]]] = []
    for ops in (CpuOps(1), gpu_ops()):
        lane, model = Lane(ops), LateModel(tmp_path).load_all()
        lane.attach("m", model.decoder)
        lane.add("greedy", "m", PROMPT[:6], 3)
        lane.add("drawn", "m", PROMPT[:3], 3, DRAWN)
        lane.add("told", "m", PROMPT[:2], 3, Sampling(seed=0, temperature=0.0, logprobs=3))
        lane.finish("greedy", "drawn", "told")
        answers.append({name: lane.tokens(name) for name in ("greedy", "drawn", "told")})
        assert len(lane.of("told")[1].logprobs[0].top) == 3
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows may be anything
@pytest.mark.parametrize("case", ["qwen2-window", "qwen3-moe"])
def test_padding_rows_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A prompt and a decode step share a batch whose rows are padded, and whose experts are not."""
    make(tmp_path, case)
    answers: list[list[Tensor]] = []
    met: list[int] = []

    def eights(count: int) -> int:
        met.append(count)
        return -(-count // 8) * 8

    ours = Ours(tmp_path, ops=gpu_ops())
    for a, b, padded in ((0, 1, lambda count: count), (2, 3, eights)):
        monkeypatch.setattr(layers, "padded_rows", padded)
        first, _ = ours.step([(a, PROMPT[:5], 0), (b, PROMPT[:2], 0)])
        second, beside = ours.step([(a, PROMPT[5:11], 5), (b, [7], 2)])
        answers.append([first, second, beside])
    assert met == [7, 7]
    for plain, wide in zip(*answers, strict=True):
        assert torch.equal(plain, wide)


@pytest.mark.parametrize("name", PUBLISHED)
def test_long_steps_are_multiplied_by_matrices_of_known_shapes(name: str) -> None:
    """cuBLAS is shown them when a model is attached (`gemm.long_rows`)."""
    config = parse_config(PUBLISHED[name], "bfloat16")
    tensors = plan_layout(config).tensors
    biased = {one.name.removesuffix("_bias") for one in tensors if one.name.endswith("_bias")}
    wanted = {
        MatrixShape(*one.shape, "bfloat16", one.name in biased)
        for one in tensors if len(one.shape) == 2 and one.name not in (EMBED, HEAD)
    }  # fmt: skip
    found = layers.shapes_of(config, "bfloat16")
    assert set(found) == wanted
    assert len(found) == len(wanted)


@pytest.mark.parametrize(("count", "rows"), [(64, 64), (65, 128), (512, 512), (1100, 1152)])
def test_long_steps_have_few_numbers_of_rows(count: int, rows: int) -> None:
    assert layers.padded_rows(count) == rows


def test_prompt_logprobs(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    lane, model = Lane(gpu_ops()), LateModel(tmp_path).load_all()
    lane.attach("m", model.decoder)
    sampling = Sampling(seed=0, temperature=0.0, prompt_logprobs=2)
    lane.add("a", "m", PROMPT, 1, sampling)
    lane.step(("a", 0, 6))
    lane.step(("a", 6, 13))
    (delta,) = lane.of("a")
    assert [one.token for one in delta.prompt_logprobs] == PROMPT[1:]


def test_a_step_waits_for_weights_and_reads_the_prompts_rows_meanwhile(tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    lane, model = Lane(gpu_ops()), LateModel(tmp_path)
    lane.attach("m", model.decoder)
    lane.add("a", "m", PROMPT[:5], 2, GREEDY)
    assert isinstance(lane.step(("a", 0, 5)), StepParked)
    while lane.executor.poll().parked:
        assert model.wanted
        assert EMBED not in model.wanted
        model.load(model.wanted)
        lane.executor.poll()
    reference, whole = Lane(gpu_ops()), LateModel(tmp_path).load_all()
    reference.attach("m", whole.decoder)
    reference.add("a", "m", PROMPT[:5], 2, GREEDY)
    reference.step(("a", 0, 5))
    assert lane.tokens("a") == reference.tokens("a")


def test_an_id_outside_the_vocabulary_fails_its_own_sequence_alone(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    lane, model = Lane(gpu_ops()), LateModel(tmp_path).load_all()
    lane.attach("m", model.decoder)
    lane.add("good", "m", PROMPT[:4], 2)
    lane.add("bad", "m", [3, 160, 4], 2)
    lane.step(("good", 0, 4), ("bad", 0, 3))
    assert lane.ended("bad") is FinishReason.ERROR
    assert lane.ended("good") is None


def test_a_fatal_exception_is_not_a_steps_own(tmp_path: Path) -> None:
    make(tmp_path, "llama")

    class Lost(RuntimeError):
        pass

    def lose(logits: Tensor, rows: Sequence[RowSampling]) -> SampledTokens:
        raise Lost

    lane = Lane(GpuOps(PlainMultiply(), DEVICE, lose), fatal=(Lost,))
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    lane.add("a", "m", PROMPT[:5], 2, Sampling(seed=3, presence_penalty=0.5))
    with pytest.raises(Lost):
        lane.step(("a", 0, 5))
    assert not lane.deltas


def test_weights_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama", torch.float32)
    lane = Lane(gpu_ops())
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    lane.add("a", "m", PROMPT[:5], 2)
    assert "float32" in lane.failed(("a", 0, 5))
    with pytest.raises(OperandError, match="contiguous"):
        handle_of(torch.zeros(4, 4, dtype=torch.float16).T, DEVICE)


def test_which_rows_the_cpu_draws() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).half()
    asked: list[list[RowSampling]] = []

    def host(some: Tensor, rows: Sequence[RowSampling]) -> SampledTokens:
        asked.append(list(rows))
        return CpuOps(1).sample(some, rows)

    plain = RowSampling(seed=0, position=0, temperature=0.0)
    rows = [
        plain,
        RowSampling(seed=0, position=0, temperature=0.7, presence=0.5),
        RowSampling(seed=0, position=0, temperature=0.0, banned=torch.tensor([1]).int()),
        RowSampling(seed=0, position=0, temperature=0.0, top_logprobs=2),
    ]
    draw = Sampler(host)(logits, rows)
    assert draw.chain is not None
    assert int(draw.chain[0]) == int(logits[0].argmax())
    assert not asked, "it waits for nothing"
    drawn = draw.collect()
    want = CpuOps(1).sample(logits.float(), rows)
    assert drawn.ids == want.ids
    assert [len(top) for top in drawn.top] == [0, 0, 0, 2]
    assert asked == [rows[1:]]
    assert Sampler(host)(logits, [plain] * 4).collect().ids == logits.argmax(-1).tolist()
    assert len(asked) == 1
    assert Sampler(host)(logits[:0], []).collect() == SampledTokens([], [])
    drawn = Sampler(host)(logits, [rows[1]] * 4)
    assert drawn.chain is None
    assert drawn.collect().ids == CpuOps(1).sample(logits.float(), [rows[1]] * 4).ids
    hot = [RowSampling(seed=7, position=i, temperature=1.5, top_k=9) for i in range(3)]
    mixed = Sampler(host)(logits, [hot[0], rows[1], *hot[1:]])
    assert mixed.collect().ids == CpuOps(1).sample(logits.float(), [hot[0], rows[1], *hot[1:]]).ids
    assert asked[-1] == [rows[1]]
    assert [gpu_ops().chains(row) for row in rows] == [True, False, False, False]

"""The executor: steps in, tokens and events out, whatever happens to a request."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane import GREEDY, Lane, LateModel
from tiny import make_checkpoint
from torch import Tensor

from c2cserve.core.events import SeqOutcome, StepDone
from c2cserve.core.request import FinishReason, Sampling
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import Layer, TokenRows

PROMPT = torch.randint(3, 160, (40,), generator=torch.Generator().manual_seed(11)).tolist()
OTHER = PROMPT[::-1]
DRAWN = Sampling(seed=5, temperature=0.9, top_p=0.95, logprobs=2)


@dataclasses.dataclass(frozen=True)
class Made:
    model: LateModel
    theirs: torch.nn.Module
    directory: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("qwen3")
    theirs = make_checkpoint(directory, "qwen3-tied")
    return Made(LateModel(directory).load_all(), theirs, directory)


@pytest.fixture
def lane(made: Made) -> Lane:
    lane = Lane()
    lane.attach("m", made.model.decoder)
    return lane


@torch.inference_mode()
def scores(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_greedy_text_is_transformers_own(lane: Lane, made: Made) -> None:
    lane.add("a", "m", PROMPT, 24)
    lane.add("b", "m", OTHER[:7], 9)
    lane.finish("a", "b")
    for name, prompt, count in (("a", PROMPT, 24), ("b", OTHER[:7], 9)):
        with torch.inference_mode():
            want = made.theirs.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=count, do_sample=False, eos_token_id=None,
            )[0, len(prompt) :].tolist()  # fmt: skip
        assert lane.tokens(name) == want
        assert lane.ended(name) is FinishReason.LENGTH
    assert len(lane.executor) == 0


def test_first_delta_alone_says_how_long_it_took_and_what_was_cached(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 3)
    lane.finish("a")
    lane.add("b", "m", PROMPT, 3)
    lane.share("b", "a", 32)
    lane.step(("b", 32, 8))
    lane.step(("b", 40, 1))
    first, second = lane.of("b")
    assert first.cached_tokens == 32
    assert first.timing is not None
    assert first.timing.slice == "lane"
    assert first.timing.queue_s > 0
    assert first.timing.prefill_s > 0
    assert first.timing.wait_weights_s == 0
    assert not first.timing.switched
    assert second.timing is None
    assert second.cached_tokens == 0
    assert lane.tokens("b") == lane.tokens("a")[:2], "and reused blocks change nothing"


def test_a_step_ends_with_one_report(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 24)
    lane.add("b", "m", OTHER[:7], 9)
    assert isinstance(lane.step(("a", 0, 40), ("b", 0, 7)), StepDone)
    assert lane.reports == 1
    assert [delta.request_id for delta in lane.deltas] == ["a", "b"]


def test_switching_models_is_reported_and_changes_nothing(lane: Lane, made: Made) -> None:
    lane.attach("n", LateModel(made.directory).load_all().decoder)
    for name, model in (("a", "m"), ("b", "n"), ("c", "m")):
        lane.add(name, model, PROMPT, 4)
    for name in ("a", "b", "c"):
        lane.step((name, 0, 40))
    for position in range(40, 43):
        for name in ("c", "b", "a"):
            lane.step((name, position, 1))
    assert lane.tokens("a") == lane.tokens("b") == lane.tokens("c")
    timings = [lane.of(name)[0].timing for name in ("a", "b", "c")]
    assert [timing.switched for timing in timings if timing] == [False, True, True]


def test_stop_token_ends_the_output_and_is_part_of_it(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 12)
    lane.finish("a")
    text = lane.tokens("a")
    stop = text[4]
    at = text.index(stop)
    stopping = dataclasses.replace(GREEDY, stop_token_ids=(stop, 1))
    lane.add("b", "m", PROMPT, 12, stopping)
    lane.finish("b")
    assert lane.tokens("b") == text[: at + 1]
    assert lane.ended("b") is FinishReason.STOP
    lane.add("c", "m", PROMPT, 12, dataclasses.replace(stopping, min_tokens=8))
    lane.finish("c")
    assert len(lane.tokens("c")) >= 8
    assert stop not in lane.tokens("c")[:8]
    assert lane.tokens("c")[:at] == text[:at]


def test_stop_token_on_the_last_allowed_position_is_a_stop(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 1)
    lane.finish("a")
    lane.add(
        "b", "m", PROMPT, 1, dataclasses.replace(GREEDY, stop_token_ids=(lane.tokens("a")[0],))
    )
    lane.finish("b")
    assert lane.ended("b") is FinishReason.STOP


@pytest.mark.parametrize("sent", [1, 5, 9])
def test_resumed_request_continues_exactly(lane: Lane, sent: int) -> None:
    penalized = dataclasses.replace(DRAWN, presence_penalty=0.7, frequency_penalty=0.3)
    lane.add("whole", "m", PROMPT, 10, penalized)
    lane.finish("whole")
    text = lane.tokens("whole")
    lane.add("rest", "m", PROMPT + text[:sent], 10 - sent, penalized, sent=sent)
    lane.finish("rest")
    assert text[:sent] + lane.tokens("rest") == text
    assert [d.logprobs for d in lane.of("whole")[sent:]] == [d.logprobs for d in lane.of("rest")]


def test_preempted_request_continues_exactly(lane: Lane) -> None:
    lane.add("whole", "m", PROMPT, 6, DRAWN)
    lane.finish("whole")
    lane.add("a", "m", PROMPT, 6, DRAWN)
    lane.step(("a", 0, 40))
    lane.step(("a", 40, 1))
    lane.preempt("a")
    assert len(lane.executor) == 1
    lane.step(("a", 0, 16))
    lane.step(("a", 16, 26))  # its two drawn tokens are computed like a prompt
    for position in range(42, 45):
        lane.step(("a", position, 1))
    assert lane.of("a")[0].cached_tokens == 0
    assert [d.logprobs for d in lane.of("a")] == [d.logprobs for d in lane.of("whole")]


def test_logprobs_are_of_the_raw_logits(lane: Lane, made: Made) -> None:
    hot = dataclasses.replace(DRAWN, temperature=2.0, logprobs=3, logit_bias=((7, 100.0),))
    lane.add("a", "m", PROMPT, 4, hot)
    lane.finish("a")
    assert lane.tokens("a") == [7, 7, 7, 7]
    for i, delta in enumerate(lane.of("a")):
        want = scores(made.theirs, PROMPT + [7] * i)[-1]
        (logprob,) = delta.logprobs
        assert logprob.token == 7
        assert logprob.logprob == pytest.approx(float(want[7]), abs=1e-3)
        top = want.topk(3)
        assert [token for token, _ in logprob.top] == top.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(top.values.tolist(), abs=1e-3)


def test_no_logprobs_unless_asked_for(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 2)
    lane.add("b", "m", PROMPT, 2, dataclasses.replace(GREEDY, logprobs=0))
    lane.finish("a", "b")
    assert all(delta.logprobs == () for delta in lane.of("a"))
    assert [d.logprobs[0].token for d in lane.of("b")] == lane.tokens("a")
    assert all(d.logprobs[0].top == () for d in lane.of("b"))


@pytest.mark.parametrize("chunks", [(40,), (1, 39), (17, 20, 3), (32, 7, 1)])
def test_prompt_logprobs_of_every_position_but_the_first(
    lane: Lane, made: Made, chunks: tuple[int, ...]
) -> None:
    lane.add("a", "m", PROMPT, 2, dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=2))
    lane.add("beside", "m", OTHER, 2)
    start = 0
    for chunk in chunks:
        lane.step(("beside", start, chunk), ("a", start, chunk))
        start += chunk
    lane.step(("a", 40, 1))
    first, second = lane.of("a")
    want = scores(made.theirs, PROMPT)
    assert [entry.token for entry in first.prompt_logprobs] == PROMPT[1:]
    for i, entry in enumerate(first.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(want[i, PROMPT[i + 1]]), abs=1e-3)
        assert [token for token, _ in entry.top] == want[i].topk(2).indices.tolist()
    assert second.prompt_logprobs == ()
    assert first.tokens[0] == int(want[-1].argmax()), "and the drawn token is the last row's"


def test_dropped_request_is_forgotten_at_once(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 8)
    lane.add("b", "m", OTHER, 8)
    lane.step(("a", 0, 40), ("b", 0, 20))
    lane.drop("b")
    assert len(lane.executor) == 1
    lane.drop("unknown")
    lane.drop("a")
    assert len(lane.executor) == 0
    assert lane.ended("a") is None, "who drops it knows"


def test_truncated_request_ends_with_what_it_has_or_an_error(lane: Lane) -> None:
    lane.add("a", "m", PROMPT, 8)
    lane.add("b", "m", OTHER, 8)
    lane.add("resumed", "m", OTHER, 8, sent=3)
    lane.step(("a", 0, 40), ("b", 0, 20))
    for name in ("a", "b", "resumed"):
        lane.truncate(name)
    assert lane.ended("a") is FinishReason.LENGTH
    assert lane.ended("b") is FinishReason.ERROR
    assert "40 tokens" in lane.of("b")[-1].error
    assert lane.ended("resumed") is FinishReason.LENGTH
    assert len(lane.executor) == 0


def test_values_that_are_not_numbers_fail_their_own_sequence_only(
    tmp_path: Path, made: Made
) -> None:
    poison = 9
    assert poison not in PROMPT
    theirs = make_checkpoint(tmp_path, "llama")
    with torch.no_grad():
        theirs.model.embed_tokens.weight[poison] = torch.nan
    theirs.save_pretrained(tmp_path)
    lane = Lane()
    lane.attach("m", LateModel(tmp_path).load_all().decoder)
    lane.add("alone", "m", PROMPT, 5)
    lane.finish("alone")
    lane.add("good", "m", PROMPT, 5)
    lane.add("bad", "m", [*OTHER, poison], 5)
    done = lane.step(("bad", 0, 41), ("good", 0, 40))
    assert isinstance(done, StepDone)
    assert set(done.outcomes) == {
        SeqOutcome("bad", 0, finished=True, failed=True), SeqOutcome("good", 1, finished=False),
    }  # fmt: skip
    assert lane.ended("bad") is FinishReason.ERROR
    assert "not numbers" in lane.of("bad")[-1].error
    assert len(lane.executor) == 1
    for position in range(40, 44):
        lane.step(("good", position, 1))
    assert lane.tokens("good") == lane.tokens("alone")


class Failing(CpuOps):
    """Raises when `armed`, after the first layer."""

    armed = False

    def run_layers(
        self, hidden: Tensor, layers: Sequence[Layer], rows: TokenRows,
        rope: tuple[Tensor, Tensor], arena: Tensor, wanted: Tensor | None = None,
    ) -> None:  # fmt: skip
        if self.armed:
            super().run_layers(hidden, layers[:1], rows, rope, arena)
            raise MemoryError("no room for activations")
        super().run_layers(hidden, layers, rows, rope, arena, wanted)


def test_requests_of_a_failed_step_go_on_or_fail_as_they_are_told(made: Made) -> None:
    ops, renewed = Failing(1), list[bool]()
    lane = Lane(ops, renew=lambda: renewed.append(ops.armed))
    lane.attach("m", made.model.decoder)
    for name in ("a", "b", "c"):
        lane.add(name, "m", PROMPT, 4)
    ops.armed = True
    assert "no room for activations" in lane.failed(("a", 0, 40), ("b", 0, 20))
    ops.armed = False
    assert renewed == [True]
    assert lane.executor.poll().renewals == 1
    lane.fail("b", "no room")
    lane.finish("a")
    lane.finish("c")
    assert (lane.ended("b"), lane.of("b")[-1].error) == (FinishReason.ERROR, "no room")
    assert lane.tokens("a") == lane.tokens("c")
    assert len(lane.executor) == 0


def test_a_slice_whose_parts_can_not_be_built_anew_ends(made: Made) -> None:
    def lost() -> None:
        raise OSError("no device")

    ops = Failing(1)
    lane = Lane(ops, renew=lost)
    lane.attach("m", made.model.decoder)
    lane.add("a", "m", PROMPT, 4)
    ops.armed = True
    with pytest.raises(OSError, match="no device"):
        lane.step(("a", 0, 40))


def test_a_request_that_can_not_be_taken_leaves_nothing(made: Made) -> None:
    lane = Lane()
    lane.attach("m", made.model.decoder)
    with pytest.raises(OverflowError):
        lane.add("a", "m", [1, 2**31], 4)
    assert len(lane.executor) == 0


def test_detached_model_is_unmapped(made: Made) -> None:
    model = LateModel(made.directory).load_all()
    lane = Lane()
    lane.attach("m", model.decoder)
    lane.add("a", "m", PROMPT, 2)
    lane.finish("a")
    del model.decoder, model.segment

    def mapped() -> bool:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return any(line.endswith(str(model.path)) for line in maps)

    assert mapped()
    lane.executor.detach("m")
    assert not mapped()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_request_s_output_depends_on_nothing_beside_it(made: Made, data: st.DataObject) -> None:
    """Random prompts, chunks and batches: tokens and log-probabilities to the last bit."""
    lane = Lane()
    lane.attach("m", made.model.decoder)
    count, max_new = data.draw(st.integers(1, 5), "requests"), 5
    prompts = {
        f"r{i}": data.draw(st.lists(st.integers(3, 159), min_size=1, max_size=40))
        for i in range(count)
    }
    for name, prompt in prompts.items():
        for copy in (name, f"{name} alone"):
            lane.add(copy, "m", prompt, max_new, dataclasses.replace(DRAWN, seed=len(prompt)))
        lane.finish(f"{name} alone")
    computed = dict.fromkeys(prompts, 0)
    while running := [name for name in prompts if not lane.ended(name)]:
        chosen = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        parts = []
        for name in chosen:
            length = len(prompts[name]) + len(lane.tokens(name))
            tokens = data.draw(st.integers(1, length - computed[name]))
            parts.append((name, computed[name], tokens))
            computed[name] += tokens
        lane.step(*parts)
    for name in prompts:
        assert [d.logprobs for d in lane.of(name)] == [d.logprobs for d in lane.of(f"{name} alone")]

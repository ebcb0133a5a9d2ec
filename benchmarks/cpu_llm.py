"""Decode and prefill of a 1B-class Llama (random weights, bfloat16): our engine against
transformers `generate`, on the same cores, in one run.

    python benchmarks/cpu_llm.py [--layers 16] [--out benchmarks/results/cpu_llm.json]
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from local_engine import LocalEngine
from report import report
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

PROMPT, OUTPUT = 32, 8


def make_checkpoint(folder: Path, layers: int) -> Path:
    """Llama 3.2 1B's shape (1.24 B parameters with 16 layers)."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, intermediate_size=8192, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    path = folder / "llama-1b"
    model.save_pretrained(path)
    return path


def timed(call: Callable[[], object], repeats: int) -> float:
    """Best of a few: other work on the machine only ever makes it slower."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count * 1000 + length)
    return [[rng.randrange(1000, 100_000) for _ in range(length)] for _ in range(count)]


class Transformers:
    def __init__(self, checkpoint: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, batch: list[list[int]], tokens: int) -> list[float]:
        """Returns when each token of the batch was there."""
        ids = torch.tensor(batch)
        times: list[float] = []

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, logits_processor=LogitsProcessorList([note]),
        )  # fmt: skip
        assert output.shape[1] == ids.shape[1] + tokens
        return times

    def decode_tokens_per_s(self, batch: int, repeats: int) -> float:
        """From the first token to the last, as of ours: prefill is not in it."""
        runs = [self.run(prompts(batch, PROMPT), OUTPUT + 1) for _ in range(repeats)]
        return max(batch * OUTPUT / (times[-1] - times[0]) for times in runs)

    def prefill_tokens_per_s(self, length: int, repeats: int) -> float:
        work = prompts(1, length)
        return length / timed(lambda: self.run(work, 1), repeats)

    def mixed_tokens_per_s(self, lengths: list[int]) -> float:
        """Requests of different lengths in one static batch: it runs until the longest ends."""
        work = prompts(len(lengths), PROMPT)
        return sum(lengths) / timed(lambda: self.run(work, max(lengths)), 1)


class Ours:
    def __init__(self, checkpoint: Path, cpus: list[int]) -> None:
        self.engine = LocalEngine(checkpoint, cpus)

    def decode_tokens_per_s(self, batch: int, repeats: int) -> float:
        rates = []
        for _ in range(repeats):
            answers = self.engine.run(prompts(batch, PROMPT), [OUTPUT + 1] * batch)
            first = max(answer.first_s for answer in answers)
            last = max(answer.last_s for answer in answers)
            rates.append(batch * OUTPUT / (last - first))
        return max(rates)

    def prefill_tokens_per_s(self, length: int, repeats: int) -> float:
        work = prompts(1, length)
        return length / timed(lambda: self.engine.run(work, [1]), repeats)

    def mixed_tokens_per_s(self, lengths: list[int]) -> float:
        """The same requests, eight at a time, a new one as soon as one ends."""
        work = prompts(len(lengths), PROMPT)
        return sum(lengths) / timed(lambda: self.engine.run(work, lengths), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cpus))
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        checkpoint = make_checkpoint(Path(folder), arguments.layers)
        ours, theirs = Ours(checkpoint, cpus), Transformers(checkpoint)

    def compare(what: str, mine: float, peer: float) -> None:
        row = {"what": what, "ours": mine, "transformers": peer, "ratio": mine / peer}
        rows.append(row)
        print(json.dumps(row), flush=True)

    repeats = arguments.repeats
    for batch in (1, 8):
        mine = ours.decode_tokens_per_s(batch, repeats)
        peer = theirs.decode_tokens_per_s(batch, repeats)
        compare(f"decode, batch {batch}, tokens/s", mine, peer)
    lengths = [2, 8, 4, 6, 2, 8, 1, 4]
    mine, peer = ours.mixed_tokens_per_s(lengths), theirs.mixed_tokens_per_s(lengths)
    compare("8 requests of 1 to 8 tokens, output tokens/s with prefill", mine, peer)
    mine, peer = ours.prefill_tokens_per_s(128, repeats), theirs.prefill_tokens_per_s(128, repeats)
    compare("prefill, 128 tokens, tokens/s", mine, peer)
    ours.engine.close()
    report(rows, arguments.out, layers=arguments.layers, prompt=PROMPT, output=OUTPUT)


if __name__ == "__main__":
    main()

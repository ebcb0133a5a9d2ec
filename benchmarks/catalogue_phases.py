"""What `gpu_catalogue.py` asks of a running server, and what it makes of the answers."""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from typing import Any

from catalogue_client import (
    TOLERANCE,
    Answer,
    AnswerFailed,
    Client,
    Compared,
    Question,
    phases,
    question,
    rms,
)
from catalogue_files import Pick
from catalogue_server import Server
from gpu_models import config_of

_LONG_TOKENS, _SWITCH_TOKENS, _KILL_TOKENS = 4, 2, 64
_SAME = 4
"""Prompts that all models of a shape are asked."""
_KILL_AT = 10
_BACK_S = 120.0
_SWITCH_P50_S, _SWITCH_P99_S = 5e-3, 20e-3
_GROWN_BYTES_MAX = 512 << 20
"""Of what processes and GPUs hold, from when every model was asked to the end."""


class Phases:
    def __init__(
        self, server: Server, made: Pick, given: argparse.Namespace, until_s: float,
        results: dict[str, Any], keep: Callable[[], None],
    ) -> None:  # fmt: skip
        self._server, self._made, self._given = server, made, given
        self._until_s, self._results, self._keep = until_s, results, keep
        self._random = random.Random(11)
        self._alone: dict[tuple[str, tuple[int, ...]], Answer] = {}
        self._vocab = {shape: config_of(shape).vocab for shape in made.shapes}
        self._cut = ""
        """Why not all of a phase's questions were asked."""
        results["phases"] = {}

    async def run(self) -> None:
        async with Client(self._server.url) as client:
            self._client = client
            memory = {"start": self._server.memory()}
            interleaved = await self._phase("interleaved", self._interleaved)
            await self._phase("alone", self._ask_alone)
            self._compare("interleaved", interleaved)
            self._between_models()
            memory["every model asked"] = self._server.memory()
            switched = await self._phase("switches", self._switches)
            self._compare("switches", switched)
            self._switch_bars(switched)
            self._compare("together", await self._phase("together", self._together))
            memory["end"] = self._server.memory()
            self._flat(memory)
            if self._given.kill:
                await self._phase("kill", self._kill)

    async def _phase(self, name: str, ask: Callable[[], Awaitable[list[Answer]]]) -> list[Answer]:
        """A phase that fails is named, and the next one runs."""
        before, began_s = self._server.metrics(), time.monotonic()
        answers: list[Answer] = []
        self._cut = ""
        try:
            answers = await ask()
            if self._cut:
                self._fail(name, self._cut)
        except (AnswerFailed, OSError) as error:
            self._fail(name, f"{type(error).__name__}: {error}")
        row = self._results["phases"].setdefault(name, {})
        row["seconds"] = time.monotonic() - began_s
        shapes = {answer.question.shape for answer in answers}
        for shape in sorted(shapes):
            for length in sorted({len(a.question.prompt) for a in answers}):
                of = [a for a in answers if a.question.shape == shape
                      and len(a.question.prompt) == length]  # fmt: skip
                if of:
                    row.setdefault("shapes", {}).setdefault(shape, {})[f"prompt {length}"] = (
                        self._table(name, shape, length, of)
                    )
        after = self._server.metrics()
        row["metrics"] = {
            name: value - before.get(name, 0.0) for name, value in after.items()
            if name.endswith(("_total", "_sum", "_count")) and value != before.get(name)
        }  # fmt: skip
        self._keep()
        return answers

    def _fail(self, name: str, reason: str) -> None:
        self._results["failed"][name] = reason
        print(f"{name}: FAILED: {reason}", flush=True)

    def _table(self, name: str, shape: str, length: int, answers: list[Answer]) -> dict[str, Any]:
        found = phases(answers)
        cells = [f"{part.removesuffix('_s')} {_shown(spread['p50'])} / {_shown(spread['p99'])}"
                 for part, spread in found.items() if isinstance(spread, dict)]  # fmt: skip
        print(
            f"{name:12} {shape:14} prompt {length:5}: {found['answers']} answers,"
            f" {found['switched']} switched; p50 / p99: {', '.join(cells)}", flush=True,
        )  # fmt: skip
        return found

    # ---- phases ---------------------------------------------------------------------------------

    async def _interleaved(self) -> list[Answer]:
        asked: list[Question] = []
        for one in self._questions():
            asked += self._shuffled(one)
        return await self._ask(asked)

    def _questions(self) -> list[list[Question]]:
        """Lists of one question to every model."""
        given = self._given
        kinds = [("short", given.short, given.tokens), ("long", given.long, _LONG_TOKENS)]
        return [
            [
                question(e.id, e.shape, self._vocab[e.shape], length, tokens, f"{kind} {turn}")
                for e in self._made.entries
            ]
            for turn in range(given.rounds) for kind, length, tokens in kinds
        ]  # fmt: skip

    async def _ask_alone(self) -> list[Answer]:
        """All questions to a model in a row, and some that all models of its shape are asked."""
        lists, given = self._questions(), self._given
        asked: list[Question] = []
        for i, entry in enumerate(self._made.entries):
            asked += [one[i] for one in lists]
            for number in range(_SAME):
                drawn = question(entry.shape, entry.shape, self._vocab[entry.shape],
                                 given.short, given.tokens, f"same {number}")  # fmt: skip
                asked.append(Question(entry.id, entry.shape, drawn.prompt, drawn.tokens))
        answers = await self._ask(asked)
        for answer in answers:
            self._alone[answer.question.model, answer.question.prompt] = answer
        return answers

    async def _switches(self) -> list[Answer]:
        first = self._questions()[0]
        brief = [Question(q.model, q.shape, q.prompt, _SWITCH_TOKENS) for q in first]
        asked: list[Question] = []
        while len(asked) < self._given.switches:
            asked += self._shuffled(brief, asked[-1].model if asked else "")
        return await self._ask(asked[: self._given.switches])

    async def _together(self) -> list[Answer]:
        asked = [one for some in self._questions() for one in some]
        self._random.shuffle(asked)
        return await self._ask(asked, self._given.at_once)

    async def _kill(self) -> list[Answer]:
        """The same long answer undisturbed, and with its worker killed in the middle."""
        entry = self._made.entries[0]
        asked = question(entry.id, entry.shape, self._vocab[entry.shape], self._given.short,
                         _KILL_TOKENS, "kill")  # fmt: skip
        undisturbed = await self._client.ask(asked)
        pids: list[int] = []

        async def kill(answer: Answer) -> None:
            pids.append(await asyncio.to_thread(self._server.kill_worker, answer.slice))

        killed_s = time.monotonic()
        disturbed = await self._client.ask(asked, _KILL_AT, kill)
        row = self._results["phases"].setdefault("kill", {})
        row["stream_s"] = time.monotonic() - killed_s
        row["back_s"] = await asyncio.to_thread(self._back_s, pids, killed_s)
        self._alone[asked.model, asked.prompt] = undisturbed
        self._compare("kill", [disturbed])
        print(f"kill: slice back after {row['back_s']:.1f} s", flush=True)
        return [disturbed]

    def _back_s(self, pids: Sequence[int], since_s: float) -> float:
        """Until every slice is up again. Raises `AnswerFailed`."""
        while time.monotonic() - since_s < _BACK_S:
            slices = self._server.state()["slices"]
            if all(one["state"] == "up" and one["pid"] not in pids for one in slices):
                return time.monotonic() - since_s
            time.sleep(0.05)
        raise AnswerFailed(f"no new worker in {_BACK_S:.0f} s")

    async def _ask(self, asked: list[Question], at_once: int = 1) -> list[Answer]:
        answers = await self._client.ask_all(asked, at_once, self._until_s)
        if len(answers) < len(asked):
            self._cut = f"out of time: {len(answers)} of {len(asked)} were asked"
        return answers

    def _shuffled(self, questions: list[Question], last: str = "") -> list[Question]:
        turns = self._random.sample(questions, len(questions))
        return turns[::-1] if turns[0].model == last else turns

    # ---- judging --------------------------------------------------------------------------------

    def _compare(self, name: str, answers: Sequence[Answer]) -> None:
        compared = Compared()
        for answer in answers:
            alone = self._alone.get((answer.question.model, answer.question.prompt))
            if alone is not None:
                compared.add(answer, alone)
        found = self._results["phases"][name]["compared"] = compared.summary()
        print(
            f"{name}: {found['equal']} of {found['answers']} answers equal the model's alone,"
            f" {found['bit_equal']} to the bit; largest rms {found['largest_rms']:.4f} nats",
            flush=True,
        )
        for wrong in found["wrong"][:5]:
            print(f"{name}: WRONG: {wrong}", flush=True)
        if len(answers) > compared.equal:
            self._fail(f"{name} compared", f"{len(answers) - compared.equal} answers are not equal")
        self._keep()

    def _between_models(self) -> None:
        """How far apart two models of one shape are on the same prompts: what the tolerance must
        tell apart. Random models are alike on a prompt now and then. One that answers in another's
        place is seen if any of its prompts tells them apart."""
        groups: dict[tuple[int, ...], dict[str, Answer]] = {}
        for (model, prompt), answer in self._alone.items():
            groups.setdefault(prompt, {})[model] = answer
        apart: dict[tuple[str, str], list[bool]] = {}
        least: float | None = None
        for answers in groups.values():
            for one, other in combinations(sorted(answers), 2):
                a, b = answers[one], answers[other]
                distance = rms(a.logprobs, b.logprobs)
                least = distance if least is None else min(least, distance)
                told = a.text != b.text or distance > TOLERANCE
                apart.setdefault((one, other), []).append(told)
        alike = sum(not any(prompts) for prompts in apart.values())
        self._results["between_models_rms"] = {
            "least": least, "pairs": len(apart), "alike": alike,
            "alike_on_a_prompt": sum(not all(prompts) for prompts in apart.values()),
        }  # fmt: skip
        if least is not None:
            told = sum(map(sum, apart.values())) / sum(map(len, apart.values()))
            self._results["between_models_rms"]["told_apart"] = told
            print(f"a prompt tells two models of one shape apart in {told:.1%} of cases; they are"
                  f" {least:.3f} nats apart at least", flush=True)  # fmt: skip
        if alike:
            self._fail("between models", f"{alike} pairs would pass for one another")

    def _switch_bars(self, answers: Sequence[Answer]) -> None:
        times = sorted(answer.switch_s for answer in answers if answer.switched)
        if not times:
            return
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(0.99 * len(times)))]
        met = p50 <= _SWITCH_P50_S and p99 <= _SWITCH_P99_S
        self._results["switch"] = {"count": len(times), "p50_s": p50, "p99_s": p99, "met": met}
        print(f"{len(times)} switches: p50 {_shown(p50)}, p99 {_shown(p99)}"
              f" (bars 5 and 20 ms: {'met' if met else 'MISSED'})", flush=True)  # fmt: skip

    def _flat(self, memory: dict[str, dict[str, int]]) -> None:
        early, late = memory["every model asked"], memory["end"]
        grown = {name: late[name] - early[name] for name in early if name != "available_bytes"}
        flat = max(grown.values()) <= _GROWN_BYTES_MAX
        self._results["memory"] = {**memory, "grown": grown, "flat": flat}
        said = ", ".join(f"{name.removesuffix('_bytes')} {value / 1e6:+.0f} MB"
                         for name, value in grown.items())  # fmt: skip
        print(f"memory since every model was asked: {said} ({'flat' if flat else 'NOT FLAT'})",
              flush=True)  # fmt: skip
        self._keep()


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"

"""Metrics of a catalogue with hundreds of models: what the library would write, in pieces."""

import asyncio
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from c2cserve.runtime.gateway import Gateway, Snapshot
from c2cserve.server.choices import ChoiceStream
from c2cserve.server.exposition.series import Counters, Histograms
from c2cserve.server.metrics import Metrics

BOUNDS = (1e-5, 0.001, 0.5, 1, 16384)
MODELS = ("a", "org/b:latest", 'quoted "c" \\')


class Catalogue:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def models(self) -> list[Any]:
        return [SimpleNamespace(id=name) for name in self.names]

    def snapshot(self) -> Snapshot:
        return Snapshot("i", 0.0, False, (), (), 0, 0, 0, 0)


def of(catalogue: Catalogue) -> Metrics:
    return Metrics(cast("Gateway", catalogue))


def ended(model: str) -> ChoiceStream:
    """A choice whose client left after five tokens."""
    request = SimpleNamespace(model=model, arrival_s=0.0, prompt_len=3)
    job = SimpleNamespace(request=request)
    choice = SimpleNamespace(job=job, finish="abort", output_tokens=5, first_s=None)
    return cast("ChoiceStream", choice)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_series_are_written_as_the_library_writes_them() -> None:
    rng = Random(1)
    registry = CollectorRegistry()
    their_times = Histogram("t_seconds", "T.", ["model_name"], buckets=BOUNDS, registry=registry)
    their_ends = Counter("ended", "E.", ["model_name", "met"], registry=registry)
    times, ends = Histograms("t_seconds", "T.", BOUNDS), Counters("ended", "E.", "met")
    ours = ""
    for _ in range(20):
        for model in rng.sample(MODELS, 2):
            values = [rng.choice((*BOUNDS, rng.lognormvariate(0, 9))) for _ in range(3)]
            times.observe(model, *values)
            for value in values:
                their_times.labels(model).observe(value)
            met = rng.choice(("true", "false"))
            ends.add(2, model, met)
            their_ends.labels(model, met).inc(2)
        ours = "".join((*times.write(), *ends.write()))
        assert samples(ours) == samples(generate_latest(registry).decode())
    assert [line for line in ours.splitlines() if line[0] == "#"] == [
        "# HELP t_seconds T.", "# TYPE t_seconds histogram",
        "# HELP ended_total E.", "# TYPE ended_total counter",
    ]  # fmt: skip


def test_a_large_scrape_lets_the_event_loop_go_on() -> None:
    """All streams wait for what it does at once."""
    names = [f"m{number}" for number in range(300)]
    metrics = of(Catalogue(names))
    for name in names:
        metrics.ended(ended(name), 0.1)

    async def turns_meanwhile() -> tuple[int, int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        page = await metrics.render()
        task.cancel()
        return turns, page.count(b"\n")

    turns, lines = asyncio.run(turns_meanwhile())
    assert lines > 300 * 25
    assert turns >= lines / 1000


def test_models_may_come_and_go_while_a_scrape_is_written() -> None:
    """A model that comes meanwhile loses no count; one that goes leaves nothing behind."""
    catalogue = Catalogue(f"m{number}" for number in range(100))
    metrics = of(catalogue)

    async def scrape() -> str:
        return (await metrics.render()).decode()

    async def changing() -> str:
        first = asyncio.create_task(scrape())
        await asyncio.sleep(0)
        catalogue.names = [*catalogue.names[50:], "new"]
        metrics.ended(ended("new"), 0.1)
        second = await scrape()
        await first
        assert 'vllm:generation_tokens_total{model_name="new"} 5.0\n' in second
        assert '"m1"' not in second
        return await scrape()

    page = asyncio.run(changing())
    assert 'vllm:generation_tokens_total{model_name="new"} 5.0\n' in page
    assert '"m49"' not in page
    assert '"m50"' in page

"""Tables in a terminal of 80 columns: names are whole, and columns are left out for them."""

from io import StringIO

import pytest
from rich.console import Console

from c2cserve.terminal.tables import Column, FittedTable

NAMES = ("llama-3.1-8b-instruct", "llama-3.1-8b-instruct-2", "org/qwen3-30b-a3b")
FAILED = "failed: config.json: architecture GemmaForCausalLM is not supported"


def shown(width: int, names: tuple[str, ...] = NAMES, state: str = "ready") -> list[str]:
    table = FittedTable(
        Column("model"), Column("state", wraps=True), Column("weights", right=True, rank=7),
        Column("running", right=True, rank=1), Column("TTFT p50", right=True, rank=3),
        Column("p99", right=True, rank=5), Column("SLO", right=True),
    )  # fmt: skip
    for name in names:
        table.add_row(name, f"[red]{state}[/]", "16.1 GiB", "12", "240.1 ms", "1.23 s", "100.0%")
    out = StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_names_and_values_are_whole(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert len(lines) == len(NAMES) + 4, "a line for each model"
    assert "…" not in "".join(lines)
    assert all(any(f"│ {name} " in line for line in lines) for name in NAMES)
    assert all("100.0%" in line for line in lines[3:-1])


def test_columns_go_by_their_rank() -> None:
    heads = {width: shown(width)[1] for width in (120, 80, 60, 50)}
    assert all(head in heads[120] for head in ("weights", "p99", "TTFT", "running"))
    assert "weights" not in heads[80]
    assert "p99" in heads[80]
    assert "running" in heads[60]
    assert "TTFT" not in heads[60]
    assert "running" not in heads[50]


def test_a_reason_is_broken_into_lines_and_whole() -> None:
    lines = shown(80, state=FAILED)
    assert max(map(len, lines)) <= 80
    words = " ".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert words.split() == 3 * FAILED.split()


def test_a_name_that_is_longer_than_the_terminal_is_broken_and_whole() -> None:
    name = "organisation/" + 80 * "x"
    lines = shown(60, (name,))
    assert max(map(len, lines)) <= 60
    assert "".join(line.split("│")[1].strip() for line in lines if line.startswith("│")) == name


def test_cells_may_be_missing() -> None:
    table = FittedTable(Column("node"), Column("pool"))
    table.add_row("n0")
    out = StringIO()
    Console(file=out, width=40).print(table)
    assert "n0" in out.getvalue()

"""Fields of a dataclass as options of a command."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from c2cserve.terminal.option_groups import grouped


@dataclass(frozen=True, slots=True)
class Colour:
    red: Annotated[int, typer.Option(min=0, help="How red.")] = 1
    names: Annotated[list[str] | None, typer.Option("--name")] = None


SEEN: list[tuple[int, Colour, str]] = []


@grouped
def paint(width: int, colour: Colour, tool: str = "brush") -> None:
    """Paint something."""
    SEEN.append((width, colour, tool))


@pytest.mark.parametrize(
    ("args", "seen"),
    [
        (["3"], (3, Colour(), "brush")),
        (
            ["3", "--red", "5", "--name", "a", "--name", "b", "--tool", "pen"],
            (3, Colour(5, ["a", "b"]), "pen"),
        ),
    ],
)
def test_groups_of_options(args: list[str], seen: tuple[int, Colour, str]) -> None:
    app = typer.Typer()
    app.command()(paint)
    SEEN.clear()
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    width, colour, tool = SEEN[0]
    assert (width, colour.red, tool) == (seen[0], seen[1].red, seen[2])
    assert list(colour.names or ()) == list(seen[1].names or ())
    assert "How red." in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["3", "--red", "-1"]).exit_code == 2

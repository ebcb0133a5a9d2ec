"""Fields of a dataclass as options of a command; and parts that SIGHUP reads again."""

import logging
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from c2cserve.cli.option_groups import grouped
from c2cserve.cli.reloads import ReloadError, Reloads


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


def test_one_part_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    read: list[str] = []

    def broken() -> None:
        raise ReloadError("line 3: what is this")

    reloads = Reloads()
    assert not reloads
    reloads.add("the keys", broken)
    reloads.add("the certificate", lambda: read.append("certificate"))
    assert reloads
    with caplog.at_level(logging.INFO):
        reloads.run()
    assert read == ["certificate"]
    (error,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "line 3" in error.getMessage()
    assert "goes on with what it has" in error.getMessage()

"""`c2cserve cluster status`, over agents that are played."""

import pytest
from typer.testing import CliRunner

from c2cserve.cli import cluster


def test_a_machine_that_does_not_answer_has_its_name_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its front calls it by the same end of a name. Ray's word for it is not all that is said."""
    agents = {"dabba14a1c": (None, "ActorUnavailableError")}
    monkeypatch.setattr(cluster, "_found", lambda _: (None, agents))
    done = CliRunner().invoke(cluster.app, ["status"])
    assert done.exit_code == 0
    assert "?-dabba1" in done.output
    assert "no answer" in done.output

"""`c2cserve cluster`: the nodes of a Ray cluster, as their agents see them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from c2cserve.cluster.agent import AgentState
from c2cserve.cluster.membership import NoCluster, agents_of, describe, join, stop_agents
from c2cserve.terminal.output import CliError, console, show_bytes

app = typer.Typer(no_args_is_help=True, help="Show, drain and stop the nodes of a cluster.")

Address = Annotated[
    str, typer.Option(metavar="auto|HOST:PORT", help="The cluster: its Ray head's address.")
]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name, or its beginning.")]


@app.command()
def status(address: Address = "auto") -> None:
    """List the nodes: state, requests, models, memory."""
    table = Table(box=None, pad_edge=False)
    for title in ("node", "state", "requests", "models", "pool", "restarts", "last end"):
        table.add_column(title, overflow="fold")
    for machine, (_, state) in _found(address)[1].items():
        if isinstance(state, str):
            table.add_row(f"?-{machine[:6]}", "no answer", "", "", "", "", state)
            continue
        pool = f"{show_bytes(state.pool_used_bytes)} of {show_bytes(state.pool_budget_bytes)}"
        table.add_row(
            state.name, state.state, str(state.requests), ", ".join(state.models), pool,
            str(state.restarts), state.reason,
        )  # fmt: skip
    console().print(table)


@app.command()
def drain(node: NodeName, address: Address = "auto") -> None:
    """Let a node finish its requests, and end it. Others serve its models meanwhile. The last node
    that is up is not drained."""
    _call(address, node, "drain")


@app.command()
def resume(node: NodeName, address: Address = "auto") -> None:
    """Start a drained node again."""
    _call(address, node, "resume")


@app.command()
def stop(address: Address = "auto") -> None:
    """End all nodes and their agents, and free their memory. Fronts wait for others."""
    ray, agents = _found(address)
    failed = stop_agents(ray, {machine: agent for machine, (agent, _) in agents.items()})
    count = len(agents)
    console().print(f"{count} {'node' if count == 1 else 'nodes'} stopped")
    for machine, reason in failed.items():
        console().print(
            f"?-{machine[:6]} did not answer ({reason}): its weights may stay in shared memory "
            "until the next start there"
        )


def _found(address: str) -> tuple[Any, Mapping[str, tuple[Any, AgentState | str]]]:
    """Return Ray, and all agents with what they say. Raises CliError."""
    try:
        ray = join(address)
    except NoCluster as error:
        raise CliError(str(error)) from error
    agents = agents_of(ray)
    said = describe(ray, agents)
    return ray, {one: (agents[one], said[one]) for one in sorted(agents)}


def _call(address: str, name: str, method: str) -> None:
    ray, agents = _found(address)
    named = [
        (agent, state) for agent, state in agents.values()
        if isinstance(state, AgentState) and state.name.startswith(name)
    ]  # fmt: skip
    if len(named) != 1:
        known = ", ".join(s.name for _, s in agents.values() if isinstance(s, AgentState))
        raise CliError(f"{len(named)} nodes are called {name!r}; there are: {known or 'none'}")
    [(agent, state)] = named
    said = [one for _, one in agents.values() if isinstance(one, AgentState)]
    if method == "drain" and state.state == "up" and sum(one.state == "up" for one in said) == 1:
        raise CliError(
            f"{state.name} is the only node that is up: without it no request is served. "
            "`c2cserve cluster stop` ends all nodes"
        )
    ray.get(getattr(agent, method).remote(), timeout=10.0)
    console().print(f"{method}: {state.name}")

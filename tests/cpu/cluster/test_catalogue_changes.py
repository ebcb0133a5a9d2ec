"""Models are added, removed and reloaded on all nodes and fronts, those that were away too."""

import pytest
from played_nodes import PlayedFront, PlayedNode, answer, nodes_up

from c2cserve.runtime.gateway import Refused

ENTRY: dict[str, object] = {"id": "c", "path": "/c", "pinned": True}


def catalogues(front: PlayedFront) -> list[list[str]]:
    return [sorted(node.engine.catalogue) for node in front.nodes]


async def test_a_model_is_added_and_removed_everywhere() -> None:
    nodes = [PlayedNode(f"n{i}") for i in range(3)]
    async with PlayedFront(*nodes, name="f0") as front, PlayedFront(*nodes, name="f1") as other:
        status = await front.gateway.add_model(ENTRY)
        assert status.id == "c"
        assert catalogues(front) == [["a", "b", "c"]] * 3
        assert "pinned" not in nodes[0].engine.catalogue["c"], "fronts pin"
        await front.until(lambda: other.gateway.resolve("c-alias") is not None)
        job = other.job("c")
        assert await other.run(job) == answer(job.tokens, 40)
        await other.gateway.remove_model("c-alias")
        assert catalogues(front) == [["a", "b"]] * 3
        await front.until(lambda: front.gateway.resolve("c") is None)
        with pytest.raises(Refused) as refused:
            await front.run(front.job("c"))
        assert refused.value.status == 404


async def test_a_node_that_comes_later_is_told() -> None:
    async with PlayedFront(PlayedNode("n0")) as front:
        await front.gateway.add_model(ENTRY)
        await front.gateway.remove_model("b")
        late = await PlayedNode("late").start()
        front.nodes.append(late)
        front.gateway.members({one.name: one.address for one in front.nodes})
        await front.until(lambda: sorted(late.engine.catalogue) == ["a", "c"])


async def test_a_front_that_comes_later_is_told() -> None:
    nodes = [PlayedNode("n0")]
    async with PlayedFront(*nodes, name="f0") as front:
        await front.gateway.add_model(ENTRY)
        async with PlayedFront(*nodes, name="f1") as later:
            await later.until(lambda: later.gateway.resolve("c") is not None)


async def test_a_model_that_one_node_refuses_is_on_none() -> None:
    nodes = [PlayedNode(f"n{i}") for i in range(3)]
    nodes[1].engine.refusal = Refused(400, "its pool is too small")
    async with PlayedFront(*nodes) as front:
        with pytest.raises(Refused, match="too small"):
            await front.gateway.add_model(ENTRY)
        assert catalogues(front) == [["a", "b"]] * 3
        assert front.gateway.resolve("c") is None


async def test_what_is_wrong_is_refused_before_any_node_is_asked() -> None:
    async with PlayedFront(PlayedNode("n0")) as front:
        for entry, status in (({"id": "x", "path": "bad"}, 400), ({"id": "a-alias"}, 409)):
            with pytest.raises(Refused) as refused:
                await front.gateway.add_model(entry)
            assert refused.value.status == status
        with pytest.raises(Refused) as refused:
            await front.gateway.remove_model("x")
        assert refused.value.status == 404


async def test_a_reload_reaches_all_nodes() -> None:
    nodes = [PlayedNode(f"n{i}") for i in range(2)]
    async with PlayedFront(*nodes) as front:
        # The entry of a model of the catalogue's file.
        front.gateway._models._hosted["a"].entry.update({"id": "a"})
        assert (await front.gateway.reload_model("a-alias")).id == "a"
        assert [node.engine.reloaded for node in nodes] == [["a"], ["a"]]


async def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    nodes = [PlayedNode(f"n{i}") for i in range(2)]
    async with PlayedFront(*nodes) as front:

        async def hang(entry: dict[str, object]) -> None:
            await nodes[1].stop()

        nodes[1].engine.add_model = hang  # type: ignore[method-assign,assignment]
        await front.gateway.add_model(ENTRY)
        assert sorted(nodes[0].engine.catalogue) == ["a", "b", "c"]
        await front.until(lambda: nodes_up(front) == 1)

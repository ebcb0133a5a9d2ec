"""Cached prefixes in host memory: what is found there is whole, and there is room for it.

`slice_world` checks contents: a step that read any other KV than its own prefix's would fail."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from slice_cases import request, requests, small_slice, spec, world_of
from slice_world import SliceTestWorld

from c2cserve.core.actions import BringPrefix, DropPrefix, Move, RunStep, SavePrefix, SliceAction
from c2cserve.core.events import (
    Activated,
    Deactivated,
    MoveDone,
    PrefixMoved,
    SeqOutcome,
    SliceEvent,
    StepDone,
    Submitted,
    Withdrawn,
)
from c2cserve.core.request import Slo
from c2cserve.core.step import Step
from c2cserve.policy.slice.host_prefixes import HostBlock, HostPrefixes
from c2cserve.policy.slice.policy import SlicePolicy

FAST = 1e15
"""A link over which all is quicker than computing."""


def ended(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fail: float, host_blocks: int
) -> SliceTestWorld:
    """Return a world over such a link, with its books checked after all requests have ended."""
    world = world_of(
        drawn, seed, slabs, in_flight, park, fail, host_blocks=host_blocks, link=FAST
    )  # fmt: skip
    world.run()
    world.check_end()
    return world


@settings(max_examples=40, deadline=None)
@given(
    requests, st.integers(0, 1000), st.integers(2, 12), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.05]), st.sampled_from([4, 20, 1000]),
)  # fmt: skip
def test_any_requests_find_only_whole_prefixes(
    drawn: list, seed: int, slabs: int, in_flight: int, fail: float, host: int
) -> None:
    world = ended(drawn, seed, slabs, in_flight, 0.1, fail, host_blocks=host)
    assert world.kv.host_bytes == world.kv.prefix_bytes


@settings(max_examples=60, deadline=None)
@given(
    requests, st.integers(0, 1000), st.integers(2, 6), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.05]), st.sampled_from([4, 8, 20, 1000]),
)  # fmt: skip
def test_copies_that_requests_share_with_prefixes_stay_and_go_with_them(
    drawn: list, seed: int, slabs: int, in_flight: int, fail: float, host: int
) -> None:
    world = ended(drawn, seed, slabs, in_flight, 0.1, fail, host_blocks=host)
    tier = world.policy.prefixes
    assert tier is not None
    assert tier.shared_bytes == tier.pinned_bytes == 0
    assert tier.used_bytes == world.kv.prefix_bytes == world.kv.host_bytes


def test_prefixes_do_come_back_in_such_worlds() -> None:
    """The property above is only worth something if they do."""
    drawn = [
        ("abc"[i % 3], 150, 4, 0.2 * i, i % 3, 8, 4, None, request("r").slo, False)
        for i in range(30)
    ]
    world = ended(drawn, 1, 3, 2, 0.0, 0.0, host_blocks=1000)
    assert world.kv.brought > 0
    assert world.policy.prefixes is not None
    assert world.policy.prefixes.hits > 0


def test_requests_do_share_copies_with_prefixes_in_such_worlds() -> None:
    """Requests that take turns in a small arena come in from what the prefix cache has."""
    slo = Slo(1.0, 0.05)
    drawn = [("a", 150, 40, 0.01 * i, i, 8, 40, None, slo, False) for i in range(8)]
    world = ended(drawn, 1, 3, 1, 0.0, 0.0, host_blocks=1000)
    assert world.kv.shared > 0
    assert world.kv.copied_again == 0


@given(st.data())
def test_blocks_on_the_host_are_a_tree_whose_ends_go_first(data: st.DataObject) -> None:
    host = HostPrefixes()
    pinned: list[HostBlock] = []
    shared: list[HostBlock] = []
    here: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        family, length = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5))
        match data.draw(
            st.sampled_from(["add", "unpin", "use", "share", "unshare", "evict", "drop"])
        ):
            case "add":
                parent = None
                for depth in range(length):
                    block = host.find("m", 10 * family + depth)
                    if block is None:
                        block = host.add("m", 10 * family + depth, 3, parent)
                        host.use(block, float(data.draw(st.integers(0, 3))))
                        pinned.append(block)
                        here.add(block.id)
                    parent = block
            case "unpin" if pinned:
                block = pinned.pop(data.draw(st.integers(0, len(pinned) - 1)))
                block.saved = True
                host.unpin(block)
            case "use":
                for block in host.run("m", [10 * family + depth for depth in range(length)]):
                    assert block.saved
                    host.use(block, 1.0)
            case "share":
                for block in host.run("m", [10 * family + depth for depth in range(length)]):
                    host.share(block)
                    shared.append(block)
            case "unshare" if shared:
                host.unshare(shared.pop(data.draw(st.integers(0, len(shared) - 1))))
            case "evict":
                before, size = host.used_bytes, 3 * length
                roomy = host.evict(size)
                assert roomy == (host.used_bytes <= before - size)
            case "drop" if (block := host.find("m", 10 * family + length)) is not None:
                host.drop(block)
        here.difference_update(host.dropped)
        host.dropped.clear()
        assert host.used_bytes == 3 * len(here)
        assert here >= {block.id for block in shared}, "what is shared has gone"
        assert host.shared_bytes == 3 * len({block.id for block in shared})
        assert host.pinned_bytes == 3 * len({block.id for block in pinned + shared})
        for start in (0, 10, 20):
            found = [host.find("m", start + depth) is not None for depth in range(5)]
            assert found == sorted(found, reverse=True), "a block is here without its parent"
    host.clear()
    assert host.used_bytes == host.pinned_bytes
    for block in pinned:
        host.unpin(block)
    for block in shared:
        host.unshare(block)
    assert host.used_bytes == host.shared_bytes == 0


# ---- by hand ------------------------------------------------------------------------------------

BLOCK = 2048


class Slice:
    """Two models, an arena of eight blocks. Steps and moves are over when the test says so, or with
    `run` at once."""

    def __init__(self, host_blocks: int = 100, link: float = FAST) -> None:
        slice_ = replace(
            small_slice(slabs=4, tokens=512), host_kv_bytes=host_blocks * BLOCK,
            link_bytes_per_s=link,
        )  # fmt: skip
        self.policy = SlicePolicy(slice_)
        assert self.policy.prefixes is not None
        self.tier = self.policy.prefixes
        self.now = 0.0
        for name in ("m", "other"):
            self.policy.apply(Activated(spec(name, block=BLOCK)))

    def tell(self, *events: SliceEvent) -> list[SliceAction]:
        self.now += 0.01
        for event in events:
            self.policy.apply(event)
        return list(self.policy.decide(self.now))

    def run(self, *events: SliceEvent, took_s: float = 1e-3) -> list[SliceAction]:
        """Carry out all that follows from these events, with requests of one token."""
        done: list[SliceAction] = []
        actions = self.tell(*events)
        while actions:
            done += actions
            actions = self.tell(*(event for one in actions for event in self.end(one, took_s)))
        return done

    def end(self, action: SliceAction, took_s: float) -> list[SliceEvent]:
        match action:
            case RunStep(step):
                return [landed(step)]
            case SavePrefix(move) | BringPrefix(move):
                return [PrefixMoved(move, took_s)]
            case Move(name, direction):
                return [MoveDone(name, direction)]
            case _:
                return []

    def ask(self, name: str, family: int = 1, model: str = "m", blocks: int = 3) -> Submitted:
        """A request for one token after so many blocks of a family and one token."""
        prompt = 16 * blocks + 1
        return Submitted(request(name, model, prompt, 1, self.now, family=family, shared=blocks))

    def fill(self) -> None:
        """Have the other model push all out of the arena."""
        self.run(self.ask(f"fills {self.now}", int(self.now * 100) + 5, "other", blocks=7))


def landed(step: Step) -> StepDone:
    names = [part.request_id for part in step.seqs if part.emits]
    return StepDone(step.id, tuple(SeqOutcome(name, 1, finished=True) for name in names), 0.1)


def steps(actions: Sequence[SliceAction]) -> list[Step]:
    return [one.step for one in actions if isinstance(one, RunStep)]


def brings(actions: Sequence[SliceAction]) -> list[BringPrefix]:
    return [one for one in actions if isinstance(one, BringPrefix)]


def test_a_prefix_that_the_arena_gave_up_comes_back() -> None:
    slice_ = Slice()
    [first, save] = slice_.run(slice_.ask("first"))
    assert isinstance(first, RunStep)
    assert isinstance(save, SavePrefix)
    assert len(save.ids) == 3
    slice_.fill()
    [bring, again] = slice_.run(slice_.ask("again"))
    assert isinstance(bring, BringPrefix)
    assert bring.ids == save.ids
    assert isinstance(again, RunStep)
    [part] = again.step.seqs
    assert (part.start, part.tokens, part.fresh) == (48, 1, True)
    assert part.new_blocks[:3] == bring.blocks
    assert (slice_.policy.cached_tokens, slice_.tier.tokens, slice_.tier.hits) == (48, 48, 1)
    assert not brings(slice_.run(slice_.ask("third"))), "the arena has it again"
    assert slice_.policy.arena_hits == 1


def test_a_prefix_of_another_salt_or_model_is_not_found() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("first", family=1))
    slice_.fill()
    for asked in (slice_.ask("salted", family=2), slice_.ask("same hash", 1, "other")):
        actions = slice_.run(asked)
        assert not brings(actions)
        assert steps(actions)[0].seqs[0].start == 0


def test_the_arena_has_the_beginning_and_the_host_the_rest() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("long", blocks=4))
    slice_.fill()
    slice_.run(slice_.ask("short", blocks=2))
    [bring] = brings(slice_.run(slice_.ask("again", blocks=4)))
    assert len(bring.ids) == 2
    assert slice_.policy.arena_hits == 1


def test_who_needs_the_same_blocks_waits_for_them() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("first", blocks=2))
    slice_.fill()
    [bring] = slice_.tell(slice_.ask("a", blocks=2))
    assert isinstance(bring, BringPrefix)
    assert slice_.tell(slice_.ask("b", blocks=2)) == []
    [step] = steps(slice_.tell(PrefixMoved(bring.move, 1e-3)))
    assert {part.request_id: part.start for part in step.seqs} == {"a": 32, "b": 32}
    assert slice_.tier.hits == 1


def test_what_is_computed_sooner_is_computed() -> None:
    slice_ = Slice(link=1.0)
    slice_.run(slice_.ask("first"))
    slice_.fill()
    assert not brings(slice_.run(slice_.ask("again")))
    assert slice_.tier.slower_tokens == 48
    assert slice_.policy.cached_tokens == 0


def test_without_a_link_the_rate_is_that_of_earlier_copies() -> None:
    for took_s, quicker in ((1e-4, True), (10.0, False)):
        slice_ = Slice(link=0.0)
        slice_.run(slice_.ask("first"), took_s=took_s)
        slice_.run(slice_.ask("fills", 9, "other", blocks=7), took_s=took_s)
        assert bool(brings(slice_.run(slice_.ask("again")))) == quicker


def test_it_outlives_the_model_on_the_slice() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("first"))
    slice_.run(Deactivated("m"), Activated(spec("m", block=BLOCK)))
    [bring] = brings(slice_.run(slice_.ask("again")))
    assert len(bring.ids) == 3


def test_a_copy_whose_block_the_arena_gave_up_is_dropped() -> None:
    slice_ = Slice()
    [run] = slice_.tell(slice_.ask("first"))
    assert isinstance(run, RunStep)
    [save] = slice_.tell(landed(run.step))
    assert isinstance(save, SavePrefix)
    slice_.policy.apply(Deactivated("m"))
    assert slice_.run(PrefixMoved(save.move, 1e-3)) == [DropPrefix(save.ids)]
    assert slice_.tier.used_bytes == 0


def test_a_request_that_leaves_while_its_prefix_comes_holds_nothing() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("first"))
    slice_.fill()
    [bring] = brings(slice_.tell(slice_.ask("again")))
    slice_.tell(Withdrawn("again"))
    assert slice_.policy.arena.held_bytes > 0, "its blocks are being written"
    slice_.run(PrefixMoved(bring.move, 1e-3))
    assert slice_.policy.arena.held_bytes == 0
    assert not brings(slice_.run(slice_.ask("third"))), "they came all the same"


def test_values_that_fail_take_the_prefix_out_of_both_tiers() -> None:
    slice_ = Slice()
    slice_.run(slice_.ask("first"))
    slice_.fill()
    actions = slice_.tell(slice_.ask("again"))
    [run] = slice_.tell(*slice_.end(actions[0], 1e-3))
    assert isinstance(run, RunStep)
    failed = StepDone(run.step.id, (SeqOutcome("again", 0, finished=True, failed=True),), 0.1)
    [drop] = slice_.run(failed)
    assert isinstance(drop, DropPrefix)
    actions = slice_.run(slice_.ask("third"))
    assert not brings(actions)
    assert steps(actions)[0].seqs[0].start == 0


def test_the_cheapest_goes_first() -> None:
    """Of two prefixes the one that is asked for again stays when a third one needs room."""
    slice_ = Slice(host_blocks=7)
    for family in (1, 2, 1, 3):
        slice_.run(slice_.ask(f"r{slice_.now}", family))
    assert slice_.tier.used_bytes == 7 * BLOCK
    find = slice_.tier._host.find
    assert [find("m", 1000 + i) is not None for i in range(3)] == [True, True, True]
    assert [find("m", 2000 + i) is not None for i in range(3)] == [True, False, False]
    assert [find("m", 3000 + i) is not None for i in range(3)] == [True, True, True]


def test_kv_of_paused_requests_goes_before_prefixes() -> None:
    slice_ = Slice(host_blocks=8)
    for family in (1, 2):
        slice_.run(slice_.ask(f"r{family}", family))
    assert slice_.tier.used_bytes == 6 * BLOCK
    [step] = steps(slice_.tell(Submitted(request("long", "other", 50, 60, slice_.now))))
    actions = slice_.tell(drawn(step, "long"))
    [step] = steps(actions)
    slice_.policy.apply(drawn(step, "long"))
    for action in actions[:-1]:
        for event in slice_.end(action, 1e-3):
            slice_.policy.apply(event)
    slice_.policy._put_aside(slice_.policy._seqs["long"])
    actions += slice_.policy.decide(slice_.now)
    assert any(isinstance(one, Move) and one.direction == "out" for one in actions)
    assert any(isinstance(one, DropPrefix) for one in actions)
    rotation = slice_.policy._rotation
    assert rotation is not None
    assert rotation.host_bytes + slice_.tier.shared_bytes == 4 * BLOCK
    assert slice_.tier.used_bytes <= 8 * BLOCK - rotation.host_bytes


def test_a_prompt_goes_to_the_host_once() -> None:
    """Its blocks are a prefix's there. A request has copies of its own of the others only."""
    slice_ = Slice()
    for name in ("first", "second"):  # the second one finds the prefix
        asked = request(name, "m", 49, 40, slice_.now, family=1, shared=3)
        out = places_out(slice_, Submitted(asked), name, tokens=34)
        assert sorted(Counter(out).values()) == [1] * (5 if name == "first" else 2)


def paused(slice_: Slice, name: str) -> list[SliceAction]:
    """Have a request of 49 tokens on the host, its prompt's blocks as a prefix's."""
    asked = request(name, "m", 49, 60, slice_.now, family=1, shared=3)
    actions = slice_.tell(Submitted(asked))
    while not any(isinstance(one, SavePrefix) for one in actions):
        actions = slice_.tell(*(drawn(step, name) for step in steps(actions)))
    events = [event for one in actions for event in slice_.end(one, 1e-3) if not steps([one])]
    slice_.policy.apply(drawn(steps(actions)[0], name))
    for event in events:
        slice_.policy.apply(event)
    assert slice_.policy._put_aside(slice_.policy._seqs[name])
    return slice_.tell()


def test_a_paused_requests_prefix_does_not_make_way() -> None:
    """Others that are cached go before, and it comes in from there."""
    slice_ = Slice(host_blocks=8)
    actions = paused(slice_, "r")
    [out] = [one for one in actions if isinstance(one, Move) and one.direction == "out"]
    assert (out.first, len(out.blocks), out.shared) == (3, 1, 3)
    events = slice_.end(out, 1e-3)
    for family in (7, 8, 9):  # each has room for three blocks beside these four
        slice_.policy.apply(slice_.ask(f"other {family}", family, "other"))
    seen = slice_.tell(*events)
    while (move := next((one for one in seen if isinstance(one, Move)), None)) is None:
        seen = slice_.tell(*(event for one in seen for event in slice_.end(one, 1e-3)))
    assert (move.request_id, move.direction, move.shared) == ("r", "in", 3)
    assert len(move.ids) == 3
    assert slice_.tier.shared_bytes == 3 * BLOCK


def test_a_request_that_leaves_while_it_comes_in_gives_its_copies_up_after_the_move() -> None:
    slice_ = Slice(host_blocks=8)
    actions = paused(slice_, "r")
    while not (moves := [one for one in actions if isinstance(one, Move)]) or (
        moves[0].direction != "in"
    ):
        actions = slice_.tell(*(event for one in actions for event in slice_.end(one, 1e-3)))
    slice_.tell(Withdrawn("r"))
    assert slice_.tier.shared_bytes == 3 * BLOCK, "they are being read"
    slice_.tell(MoveDone("r", "in"))
    assert slice_.tier.shared_bytes == slice_.tier.pinned_bytes == 0
    assert slice_.tier.used_bytes == 3 * BLOCK, "they stay cached"


def test_values_that_fail_free_what_was_shared_with_the_request() -> None:
    """Its blocks can be found no more, and their memory goes with the last of their users."""
    slice_ = Slice()
    slice_.run(slice_.ask("first"))
    actions = slice_.tell(Submitted(request("r", "m", 49, 60, slice_.now, family=1, shared=3)))
    actions = slice_.tell(drawn(steps(actions)[0], "r"))
    assert slice_.tier.shared_bytes == 3 * BLOCK
    failed = SeqOutcome("r", 0, finished=True, failed=True)
    actions = slice_.run(StepDone(steps(actions)[0].id, (failed,), 0.1))
    assert sum(len(one.ids) for one in actions if isinstance(one, DropPrefix)) == 3
    assert slice_.tier.used_bytes == slice_.tier.shared_bytes == 0


def places_out(slice_: Slice, asked: Submitted, name: str, tokens: int) -> list[int]:
    """Run a request for so many tokens. Return the places of blocks that went to the host."""
    out: list[int] = []
    actions = slice_.tell(asked)
    while tokens or actions:
        events: list[SliceEvent] = []
        for one in actions:
            match one:
                case RunStep(step) if tokens:
                    tokens -= 1
                    events.append(drawn(step, name))
                case RunStep(step):
                    events.append(landed(step))
                case SavePrefix() | Move(direction="copy" | "out"):
                    out += one.blocks
                    events += slice_.end(one, 1e-3)
                case _:
                    events += slice_.end(one, 1e-3)
        actions = slice_.tell(*events)
    return out


def drawn(step: Step, name: str) -> StepDone:
    return StepDone(step.id, (SeqOutcome(name, 1, finished=False),), 0.1)

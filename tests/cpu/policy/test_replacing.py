"""Loading a version of a model that is to replace another one."""

from cluster_cases import slice_, spec
from controller_hand import Hand

from c2cserve.core.actions import Evict, Forget, Load, Reject
from c2cserve.core.events import (
    Finished,
    ModelAdded,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
)


def test_it_is_loaded_unasked_and_others_make_room() -> None:
    hand = Hand(slice_(), models="ab", budget=20)
    assert hand.tell(ModelAdded(spec("a#2"), replaces="a")) == [Evict("b"), Load("a#2")]
    hand.tell(ModelUsable("a#2"), ModelLoaded("a#2", 10, 1.0))
    assert Forget("a") in hand.tell(ModelRemoving("a"))


def test_the_replaced_version_does_not_make_room_for_it() -> None:
    hand = Hand(slice_(), models="a", budget=15)
    assert hand.tell(ModelAdded(spec("a#2"), replaces="a")) == []
    hand.arrive("r1")
    hand.tell(ModelRemoving("a"))
    assert Forget("a") in hand.tell(Finished("r1", 8))
    assert hand.policy.wakeup == 0.0, "nothing else need happen for the next decision"
    assert hand.tell() == [Load("a#2")]


def test_a_failed_one_is_not_tried_again_unasked() -> None:
    hand = Hand(slice_(), models="a", budget=100)
    hand.tell(ModelAdded(spec("a#2"), replaces="a"))
    assert hand.tell(ModelFailed("a#2", "no such tensor")) == []
    hand.now = 1000.0
    assert hand.tell() == []


def test_two_versions_of_a_pinned_model_count_once() -> None:
    hand = Hand(slice_(), models="", budget=30)
    hand.ready(spec("a", 20, pinned=True))
    hand.tell(ModelAdded(spec("a#2", 20, pinned=True), replaces="a"), ModelAdded(spec("c", 10)))
    hand.tell(ModelRemoving("a"))
    actions = [*hand.tell(), *hand.arrive("r1", model="c"), *hand.arrive("r2", model="a#2")]
    assert not [action for action in actions if isinstance(action, Reject)]

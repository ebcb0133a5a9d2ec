"""A model that the fleet's policy wants is loaded as if a request waited for it."""

from cluster_cases import spec
from controller_hand import Hand

from c2cserve.core.actions import Evict, Load
from c2cserve.core.events import ModelAdded, ModelFailed, ModelLoaded, ModelUsable, ModelWanted


def test_it_displaces_what_is_not_used_and_is_wanted_once() -> None:
    hand = Hand(models="", budget=40)
    hand.ready(spec("old", 30))
    assert hand.tell(ModelAdded(spec("new", 30))) == []
    assert hand.tell(ModelWanted("new")) == [Evict("old"), Load("new")]
    hand.tell(ModelUsable("new"), ModelLoaded("new", 30, 1.0))
    assert hand.tell(ModelWanted("new")) == [], "it is there"
    assert hand.arrive("r", model="old") == [Evict("new"), Load("old")]
    hand.tell(ModelUsable("old"), ModelLoaded("old", 30, 1.0))
    assert hand.tell() == [], "it was wanted before it was evicted, not again"


def test_pinned_models_and_failures_end_the_wish() -> None:
    hand = Hand(models="", budget=40)
    hand.ready(spec("p", 30, pinned=True))
    hand.tell(ModelAdded(spec("new", 30)))
    assert hand.tell(ModelWanted("new")) == []
    hand = Hand(models="", budget=40)
    hand.ready(spec("old", 30))
    hand.tell(ModelAdded(spec("new", 30)))
    hand.tell(ModelWanted("new"))
    assert Load("new") not in hand.tell(ModelFailed("new", "its file is gone"))


def test_a_pinned_one_stays() -> None:
    hand = Hand(models="", budget=40)
    hand.ready(spec("old", 30))
    hand.tell(ModelAdded(spec("new", 30)))
    assert hand.tell(ModelWanted("new", pinned=True)) == [Evict("old"), Load("new")]
    hand.tell(ModelUsable("new"), ModelLoaded("new", 30, 1.0))
    assert Evict("new") not in hand.arrive("r", model="old")


def test_an_unknown_model_is_ignored() -> None:
    hand = Hand(models="", budget=40)
    assert hand.tell(ModelWanted("gone")) == []

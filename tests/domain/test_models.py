"""Which models may be asked, and by whom: D6, E3, F2."""

import pytest

from batchline.domain.models import DEFAULT_UPSTREAM, Catalog, Model, lanes_of
from batchline.domain.records import Lane

OPEN = Model(id="open", name="org/open-7b", upstreams=("gpu", "spare"))
CLOSED = Model(id="closed", name="closed", projects=frozenset({"alpha"}), paths=frozenset({"/gliner"}))


@pytest.mark.rule("F2", "With no models configured, any id goes to the default upstream.")
def test_without_models_any_id_goes_to_the_default_upstream() -> None:
    """F2."""
    found = Catalog().find("whatever", "alpha")
    assert found == Model(id="whatever", name="whatever", upstreams=(DEFAULT_UPSTREAM,))
    assert Catalog().upstreams_of("whatever") == (DEFAULT_UPSTREAM,)
    assert Catalog().takes_any
    assert Catalog().enabled("alpha") == []


def test_a_model_is_there_for_the_projects_it_is_enabled_for() -> None:
    """D6: for another project it is as if it did not exist."""
    catalog = Catalog([OPEN, CLOSED])
    assert catalog.find("open", "beta") == OPEN
    assert catalog.find("closed", "alpha") == CLOSED
    assert catalog.find("closed", "beta") is catalog.find("unknown", "beta") is None
    assert catalog.enabled("alpha") == [OPEN, CLOSED]
    assert catalog.enabled("beta") == [OPEN]


def test_a_route_is_answered_by_the_model_that_says_so() -> None:
    """E2: for requests that name no model."""
    catalog = Catalog([OPEN, CLOSED])
    assert catalog.serving("/gliner", "alpha") == CLOSED
    assert catalog.serving("/gliner", "beta") is None
    assert catalog.serving("/summary", "alpha") is None


def test_every_model_has_its_upstream() -> None:
    catalog = Catalog([OPEN, CLOSED])
    assert catalog.upstreams_of("open") == ("gpu", "spare")
    assert catalog.upstreams_of("closed") == catalog.upstreams_of("unknown") == ("default",)


def test_the_lanes_of_a_model_are_those_that_may_use_it() -> None:
    """D6, A8: lines of other projects are refused, even if the upstreams are busy."""
    assert Catalog([OPEN, CLOSED]).served() == [OPEN, CLOSED]
    assert Catalog().served() == [None]
    assert lanes_of(OPEN) == [Lane(model="open", project_id=None)]
    assert lanes_of(CLOSED) == [Lane(model="closed", project_id="alpha")]
    assert lanes_of(None) == [Lane(model=None, project_id=None)]

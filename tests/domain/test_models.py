"""Which models may be asked, and by whom: SPEC D6, E3, F2."""

from batchline.domain.models import DEFAULT_UPSTREAM, Catalog, Model
from batchline.domain.records import Lane

OPEN = Model(id="open", name="org/open-7b", upstream="gpu")
CLOSED = Model(id="closed", name="closed", projects=frozenset({"alpha"}), paths=frozenset({"/gliner"}))


def test_without_models_any_id_goes_to_the_default_upstream() -> None:
    """F2."""
    found = Catalog().find("whatever", "alpha")
    assert found == Model(id="whatever", name="whatever", upstream=DEFAULT_UPSTREAM)
    assert Catalog().upstream_of("whatever") == DEFAULT_UPSTREAM
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
    assert [catalog.upstream_of(name) for name in ("open", "closed", "unknown")] == ["gpu", "default", "default"]
    assert catalog.lanes_of("gpu") == [Lane(model="open", project_id=None)]
    assert catalog.lanes_of("default") == [Lane(model="closed", project_id="alpha")]
    assert catalog.lanes_of("gpu", "beta") == [Lane(model="open", project_id="beta")]
    assert catalog.lanes_of("default", "beta") == []
    assert Catalog().lanes_of("default", "beta") == [Lane(model=None, project_id="beta")]

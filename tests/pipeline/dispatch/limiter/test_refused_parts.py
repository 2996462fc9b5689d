"""Protects that what is refused at any limit is tolerated, and that a refusal costs a line what it should (D3, D9)."""

from batchline.pipeline.dispatch.limiter.refused_parts import FEW, RefusedParts


def with_refusals(part: float, *, requests: int = 1000, limited: bool) -> RefusedParts:
    """Return what is known after so many requests, of which a part was refused, evenly."""
    parts, refused = RefusedParts(), 0.0
    for _ in range(requests):
        refused += part
        if refused >= 1:
            refused -= 1
            parts.on_refusal(limited=limited)
        else:
            parts.on_answers(1, limited=limited)
    return parts


def test_a_refusal_costs_less_if_most_requests_are_refused() -> None:
    costs = [with_refusals(part, limited=True).cost for part in (0.0, 0.3, 0.6, 0.9)]
    assert costs[:2] == [1.0, 1.0]
    assert 0.5 < costs[2] < 0.9
    assert costs[3] == 0.5


def test_refusals_without_a_limit_are_usual_only_up_to_few() -> None:
    """They may be there because there is no limit."""
    assert 0.08 < with_refusals(0.9, limited=False).usual <= FEW
    assert with_refusals(0.9, limited=True).usual == 0.0


def test_what_a_comparison_has_shown_is_tolerated_and_costs_half() -> None:
    parts = RefusedParts()
    assert (parts.tolerated, parts.cost) == (FEW, 1.0)
    parts.on_comparison(0.4)
    assert (parts.tolerated > 0.5, parts.cost) == (True, 0.5)


def test_the_usual_part_is_forgotten_when_refusals_end() -> None:
    parts = RefusedParts()
    parts.on_comparison(0.4)
    for _ in range(20):
        parts.on_sample(0.0)
    assert parts.tolerated == FEW


def test_a_probe_raises_only_a_part_that_is_usual() -> None:
    parts = RefusedParts()
    parts.on_probe(0.3)
    assert parts.usual == 0.0
    parts.on_comparison(0.2)
    parts.on_probe(0.3)
    assert parts.usual == 0.3

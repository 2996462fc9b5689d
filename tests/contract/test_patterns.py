"""How code is found by its syntax tree, and what takes its place."""

import ast

import pytest

from tests.contract.patterns import PatternError, replace


@pytest.mark.parametrize(
    ("code", "find", "replacement", "expected"),
    [
        pytest.param("x = f( 1 )  # one", "f(1)", "2", "x = 2", id="layout does not matter"),
        pytest.param("x = a.b > 0", "_a > 0", "_a >= 0", "x = a.b >= 0", id="a wildcard is an expression"),
        pytest.param("x = y", "y", "_z", None, id="a wildcard of the replacement must be in the pattern"),
        pytest.param("x = a + a * b", "_a + _a * _b", "_b", "x = b", id="the same wildcard is the same code"),
        pytest.param("x = a + c * b", "_a + _a * _b", "_b", None, id="the same wildcard is no other code"),
        pytest.param("x = a.b(c)", "_a._b(c)", "_a._b(d)", "x = a.b(d)", id="a wildcard is the name of an attribute"),
        pytest.param("f(n=1)", "f(_a=1)", "f(_a=2)", "f(n=2)", id="a wildcard is the name of an argument"),
        pytest.param("f(1, b=2, c=3)", "f(c=3, b=2, _a=1)", "g()", None, id="all arguments must be there"),
        pytest.param("f(1, b=2, c=3)", "f(1, c=3, b=2)", "g()", "g()", id="keyword arguments have no order"),
        pytest.param("f(1, 2, b=3)", "f(1, ...)", "g()", "g()", id="dots are any arguments"),
        pytest.param("f(1, 2, b=3)", "f(..., b=4)", "g()", None, id="arguments beside dots must match"),
        pytest.param("x = (1, 2, 3)", "(1, ..., 3)", "()", "x = ()", id="dots are any elements"),
        pytest.param("if a:\n    b()\n    c()", "if a: ...", "", "pass", id="dots are any statements"),
        pytest.param("a()\nb()\nc()", "b()", "", "a()\npass\nc()", id="an empty replacement deletes a statement"),
        pytest.param("x = b()", "b()", "", None, id="only whole statements are deleted"),
        pytest.param("a()\nb()", "a()\n_a", "_a\na()", "b()\na()", id="a wildcard is a statement"),
        pytest.param("try:\n    a()\nfinally:\n    b()", "try:\n    _a\nfinally:\n    _b", "_a\n_b", "a()\nb()"),
        pytest.param("x = 1", "True", "False", None, id="kinds of constants are told apart"),
        pytest.param("x = a < b", "_a > _b", "c", None, id="operators are told apart"),
        pytest.param("x = '_a'", "'_b'", "1", None, id="a wildcard in quotes is a text"),
        pytest.param("f()\nf()", "f()", "g()", None, id="two matches are refused"),
        pytest.param("f()", "g()", "h()", None, id="no match is refused"),
        pytest.param("f()", "", "h()", None, id="an empty pattern is refused"),
        pytest.param("f()", "f(", "h()", None, id="a pattern must be Python"),
        pytest.param("x = a + b", "_a + _b", "c._a", None, id="an expression is not the name of an attribute"),
    ],
)
def test_the_one_match_is_replaced(code: str, find: str, replacement: str, expected: str | None) -> None:
    module = ast.parse(code)
    if expected is None:
        with pytest.raises(PatternError):
            replace(module, find, replacement)
    else:
        replace(module, find, replacement)
        assert ast.unparse(module) == expected

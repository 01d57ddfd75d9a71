"""The verdicts of lessons: they print one line, and they can fail."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipmdeq.checks import check, check_broken, check_equal

positive = st.floats(1e-100, 1e100)


def test_check_prints_bound_observed_slack(capsys):
    check("MGN", 2.0, 1.5)
    assert capsys.readouterr().out == "✓ MGN: bound 2 observed 1.5 slack 25.0 %\n"


def test_check_takes_tensors_and_digits(capsys):
    check("norm", torch.tensor(1.0), torch.tensor([0.123456], dtype=torch.float64), digits=3)
    assert capsys.readouterr().out == "✓ norm: bound 1 observed 0.123 slack 87.7 %\n"


def test_check_allows_rounding_at_the_bound(capsys):
    check("reached", 0.3, 0.1 + 0.2)  # one ulp above
    assert capsys.readouterr().out == "✓ reached: bound 0.3 observed 0.3 slack 0.0 %\n"


@pytest.mark.parametrize("observed", [1.00001, math.inf, math.nan, -0.1])
def test_check_raises_when_the_bound_is_broken(observed, capsys):
    with pytest.raises(AssertionError, match="✗ name: bound 1 observed"):
        check("name", 1.0, observed)
    assert capsys.readouterr().out == ""


def test_check_from_below(capsys):
    check("tight", 10.0, 9.95, at_least=0.99)
    assert "slack 0.5 %" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=r"less than 0\.99 of the bound"):
        check("loose", 10.0, 9.8, at_least=0.99)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_says_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="name: bound = .*must be"):
        check("name", bound, 0.0)


@pytest.mark.parametrize("at_least", [0.0, -1.0, 1.5, math.nan])
def test_at_least_must_be_a_share(at_least):
    with pytest.raises(ValueError, match=r"at_least = .*must be in \(0, 1\]"):
        check("name", 1.0, 1.0, at_least=at_least)


@given(bound=positive, share=st.floats(0, 2))
def test_check_decides_as_the_definition_says(bound, share):
    observed = share * bound
    if observed <= bound * (1 + 1e-6):
        check("name", bound, observed)
    else:
        with pytest.raises(AssertionError):
            check("name", bound, observed)


def test_check_equal_number_and_array(capsys):
    check_equal("number", 1 / 3, 1 / 3 + 1e-12)
    check_equal("array", np.eye(2), torch.eye(2), tol=1e-12)
    assert capsys.readouterr().out == (
        "✓ number: expected 0.3333 observed 0.3333\n✓ array: all 4 entries agree to 1e-12\n"
    )


@pytest.mark.parametrize("observed", [[1.0, 2.1], [1.0, math.nan], [1.0, math.inf]])
def test_check_equal_raises(observed):
    with pytest.raises(AssertionError, match="largest difference"):
        check_equal("array", [1.0, 2.0], observed)


@pytest.mark.parametrize(
    ("expected", "observed", "tol"),
    [([1.0], [1.0, 1.0], 1e-9), ([], [], 1e-9), (1.0, 1.0, 0.0), (1.0, 1.0, 10.0), (math.inf, 1.0, 1e-9)],
)
def test_check_equal_refuses_what_it_cannot_decide(expected, observed, tol):
    with pytest.raises(ValueError, match="must"):
        check_equal("name", expected, observed, tol=tol)


def test_check_broken(capsys):
    check_broken("claim", 0.5, 0.9)
    assert capsys.readouterr().out == "✓ claim: claimed 0.5 observed 0.9: the claim is broken\n"
    for observed in 0.5, 0.4, 0.5 * (1 + 1e-8):
        with pytest.raises(AssertionError, match="not a counter-example"):
            check_broken("claim", 0.5, observed)
    with pytest.raises(ValueError, match="observed = nan"):
        check_broken("claim", 0.5, math.nan)


@given(bound=positive, share=st.floats(0, 1))
def test_one_line_each(bound, share):
    import io
    from contextlib import redirect_stdout

    with redirect_stdout(io.StringIO()) as out:
        check("name", bound, share * bound)
    assert re.fullmatch(r"✓ name: bound \S+ observed \S+ slack \d+\.\d %\n", out.getvalue())

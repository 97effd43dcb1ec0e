"""What clients assert can fail. (CI runs the clients themselves.)"""

from __future__ import annotations

import numpy as np
import pytest

from clients import _check


def test_a_loss_that_stays_fails() -> None:
    _check.check_falls([2.0] * 5 + [1.0] * 5)
    with pytest.raises(AssertionError):
        _check.check_falls([2.0] * 10)


def test_a_restart_with_one_other_bit_fails() -> None:
    state = {"mu": np.ones(3, np.float32), "count": np.int32(4)}
    _check.check_equal(state, dict(state))
    others = (
        {**state, "mu": np.nextafter(state["mu"], np.float32(2))},
        {**state, "mu": np.ones(3)},
        {"mu": state["mu"]},
    )
    for other in others:
        with pytest.raises(AssertionError):
            _check.check_equal(state, other)

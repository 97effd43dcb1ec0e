"""Every published run gives an optimizer, with the paper's learning rate at every step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.published import RUNS
from tests.helpers import share

PARAMS = {
    "embedding": jnp.ones((9, 6)),
    "dense": {"kernel": jnp.ones((6, 8)), "bias": jnp.zeros(8)},
    "lm_head": {"kernel": jnp.ones((6, 9))},
}
GRADIENTS = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), PARAMS)
OF_METHODS = {name.partition("/")[0]: name for name in RUNS}


def _made(name: str) -> Any:
    run = RUNS[name]
    return run.optimizer(steps=run.steps or 100, learning_rate=run.learning_rate or 1e-3)


def test_every_run_gives_an_optimizer() -> None:
    for name in RUNS:
        assert jax.eval_shape(_made(name).init, PARAMS), name


@pytest.mark.parametrize("method", share(OF_METHODS, of=13))
def test_every_method_takes_a_step(method: str) -> None:
    """Of the two that start in a warm-up, the second step moves."""
    optimizer = _made(OF_METHODS[method])
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(GRADIENTS, state, PARAMS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    idle = RUNS[OF_METHODS[method]].schedule.idle
    assert np.any(updates["dense"]["kernel"]) == (idle < 2)


def test_the_schedule_is_a_warm_up_and_a_cosine() -> None:
    run = RUNS["alice/llama-130M"]
    rate = run.schedule(0.02, 20_000)
    found = [float(rate(t)) for t in (0, 1000, 2000, 11_000, 20_000)]
    np.testing.assert_allclose(found, [0, 0.01, 0.02, 0.011, 0.002], rtol=1e-5)
    rate = RUNS["shampoo/nanogpt"].schedule(1.0, 2560)
    assert float(rate(127)) == 0 and float(rate(128)) == pytest.approx(0.04)
    assert float(rate(128 + round(0.3 * 2432))) == pytest.approx(1)


def test_what_a_paper_does_not_have_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"learning_rate must be given: Refael et al., Table 3"):
        RUNS["sumo/llama-60M"].optimizer(steps=100)
    with pytest.raises(ValueError, match="steps must be given"):
        RUNS["asgo/gpt2-large-clm"].optimizer()


def test_a_change_takes_the_place_of_a_published_number() -> None:
    """Such as the column Ppl.*, where Adam trains the last layer."""
    run = RUNS["alice/llama-60M"]
    rule = curvax.MatrixRule(output_layer="auto")
    printed, changed = (
        str(curvax.summarize(run.optimizer(**changes), PARAMS))
        for changes in ({}, {"matrices": rule, "rank": 2})
    )
    assert "rank 2" in changed and changed != printed

"""Parts that read the weights: Lars, kept norms, cautious decay, clipped logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, weights_of_steps
from tests.shared.wrong_calls import assert_refused, wrong_calls

TREE = {
    "a": {"kernel": np.zeros((6, 4), np.float32)},
    "b": {"kernel": np.zeros((4, 9), np.float32)},
}
PARAMS = gradients_like(TREE, 1, seed=1)[0]
GRADIENTS = gradients_like(TREE, 5, seed=2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_without_momentum_is_optax_lars(decay):
    direction = optax.chain(
        optax.add_decayed_weights(decay), curvax.scale_by_weight_norm(0.001, eps=1e-3)
    )
    lars = optax.lars(0.5, decay, trust_coefficient=0.001, eps=1e-3, momentum=0.0)
    both = (weights_of_steps(x, PARAMS, GRADIENTS) for x in (curvax.assemble(direction, 0.5), lars))
    assert_close(*both, 8)


def test_each_matrix_of_a_batch_follows_its_own_weights():
    part = curvax.scale_by_weight_norm()
    d, w = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 4), np.float32)
    w[1] *= 5
    found, _ = part.update(d, part.init(w), w)
    assert_close(found, w, 8)
    zero, _ = part.update(d, part.init(w), 0 * w)
    assert np.array_equal(zero, d)


def test_weights_of_zero_move_as_weights_of_the_least_length_do():
    """LoRA's second factor; without one, the first step is the direction and the next ones tiny."""
    d = GRADIENTS[0]["a"]["kernel"]
    part = curvax.scale_by_weight_norm(0.5, min_rms=2.0 / d.size**0.5)
    for scale in (0, 1e-3, 3):
        w = np.float32(scale) * PARAMS["a"]["kernel"]
        found, _ = part.update(d, part.init(w), w)
        length = 0.5 * max(2.0, np.linalg.norm(w))
        assert_close(found, d * (length / np.linalg.norm(d)), 8)


def test_the_recipe_leaves_zero_however_small_gradients_are():
    optimizer, w = curvax.recipes.lars(0.01, b1=0.0), {"a": {"kernel": np.zeros((6, 8), "f")}}
    gradient = jax.tree.map(lambda x: x + np.float32(1e-9), w)
    weights = weights_of_steps(optimizer, w, [gradient] * 20)["a"]["kernel"]
    assert_close(weights[-1], np.full((6, 8), -20 * 0.01 * 1e-3, "f"), 64)


def test_an_update_of_zero_moves_no_weight_by_rounding():
    """The compiler sums the squares of constants in another order."""
    keep, w = curvax.keep_weight_norm(), gradients_like(np.zeros((9, 13, 7), np.float32), 1)[0]
    step = jax.jit(lambda x: keep.update(x, keep.init(w), w)[0])
    assert not step(0 * w).any()


@pytest.mark.parametrize("power", [-110, 100])
def test_weights_are_followed_whatever_the_scale_of_the_direction(power):
    part, w = curvax.scale_by_weight_norm(), PARAMS["b"]["kernel"]
    d = GRADIENTS[0]["b"]["kernel"]
    found, _ = part.update(np.ldexp(d, power), part.init(w), w)
    expected, _ = part.update(d, part.init(w), w)
    assert_close(found, expected)


def test_a_tree_without_leaves_needs_no_weights():
    for part in (curvax.scale_by_weight_norm(), curvax.add_cautious_decay(0.1)):
        assert part.update({}, part.init({}))[0] == {}


def test_cautious_decay_acts_where_the_step_shrinks_the_weight_and_takes_a_mask():
    w, d = np.float32([2, -2, 2, 0]), np.float32([1e-30, 1, -1, 1])
    decay = curvax.add_cautious_decay(0.1, mask={"a": True, "b": False})
    w, d = ({"a": x, "b": x} for x in (w, d))
    found, _ = decay.update(d, decay.init(w), w)
    assert_close(found, {"a": np.float32([0.2, 1, -1, 1]), "b": d["b"]})


ATTENTION = {
    "block": {
        "query": {"kernel": np.ones((4, 3, 2), np.float32)},
        "value": {"kernel": np.ones((4, 3, 2), np.float32)},
    }
}


def test_logits_of_heads_above_the_threshold_are_clipped_after_the_update():
    heads = {"*kernel": curvax.MatrixAxes(rows=0, columns=(1, 2))}
    muon = curvax.muon(0.1, weight_dimension_numbers=heads)
    optimizer = optax.chain(muon, curvax.clip_logits(10.0))
    params, grads = ATTENTION, gradients_like(ATTENTION, 1)[0]
    state = optimizer.init(params)
    logits = jnp.array([5.0, 40.0, jnp.nan])[:, None]

    @jax.jit
    def step(**statistics: Any) -> Any:
        updates, _ = optimizer.update(grads, state, params, **statistics)
        return optax.apply_updates(params, updates)

    plain, clipped = step(), step(max_logits={"block/query/kernel": logits})
    factors = np.float32([1, 0.5, 1])[None, :, None]
    query, value = (clipped["block"][name]["kernel"] for name in ("query", "value"))
    assert_close(query, factors * plain["block"]["query"]["kernel"], 4)
    assert np.array_equal(query[:, 0], plain["block"]["query"]["kernel"][:, 0])
    assert np.array_equal(value, plain["block"]["value"]["kernel"])


FLOAT16 = {"dense": {"kernel": np.ones((2, 2), np.float16)}}
INT8, SGD = curvax.to_int8(PARAMS), optax.sgd(0.1)


def update(part: Any, params: Any = PARAMS, *given: Any, **more: Any) -> Any:
    return part.update(params, part.init(params), *given, **more)


def clipped(max_logits: Any) -> Any:
    return update(curvax.clip_logits(), ATTENTION, ATTENTION, max_logits=max_logits)


@wrong_calls("""
update(scale_by_weight_norm()) -> params must be given to update
update(keep_weight_norm()) -> params must be given to update
update(tail_average(optax.identity(), 1)) -> params
update(stochastic_rounding(SGD)) -> update needs params
update(kahan_summation(SGD)) -> update needs params
update(master_weights(SGD)) -> update needs params
int8_weights(SGD).update(PARAMS, int8_weights(SGD).init(INT8)) -> update needs params
stochastic_rounding(SGD).init(FLOAT16) -> 'dense/kernel' has dtype float16 | bfloat16
kahan_summation(SGD).init(FLOAT16) -> 'dense/kernel' has dtype float16 | bfloat16
master_weights(SGD).init(FLOAT16) -> 'dense/kernel' has dtype float16 | bfloat16
int8_weights(SGD).init(PARAMS) -> no parameter in int8
to_int8({}, where='kernel') -> where must be a predicate
to_int8({'up': {'bias': np.ones(40, 'f')}}, where=lambda name, x: True) ->
    'up/bias', of shape (40,)
# Statistics of logits.
clipped({'block/key/kernel': 1.0}) -> max_logits must be a mapping | got 'block/key/kernel'
clipped({'*': 1.0}) -> max_logits must be a mapping from the paths | query/kernel
clipped({'block': {'query': 1.0}}) -> max_logits must be a mapping from the paths
clipped(3.0) -> max_logits must be a mapping from the paths
clipped({'block/query/kernel': np.ones(3)}) -> shape (4, 3, 2), got shape (3,)
""")
def test_wrong_calls_are_named(call: str, fragments: str) -> None:
    assert_refused(call, fragments, {**vars(curvax), **globals()})

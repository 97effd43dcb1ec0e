"""`weights=`: trajectories of the weights against NumPy float64 transcriptions, and where it acts.

The direction of most tests is the gradient itself, so the gradients are the updates `u` of the
transcriptions.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from curvax import weights
from tests.helpers import (
    assert_close,
    gradients_like,
    run_scanned,
    steps_of,
    weights_of_steps,
)
from tests.reference.brakes import brake_update, nvidia_brake, pinned_step, record_brake
from tests.reference.decay import decay
from tests.reference.floors import floor, floored
from tests.reference.hyperball import hyperball
from tests.reference.lengths import frobenius
from tests.shared.meshes import given, mesh_of, on, steps

STEPS = 20
RATES = 0.3 / (1 + np.arange(STEPS) / 4)
PEAK = RATES.max()
SHAPES = {"wide": (5, 9), "batch": (2, 7, 4)}
MATRICES = {name: curvax.MatrixAxes(len(shape) - 2, -1) for name, shape in SHAPES.items()}


def schedule(step: Any) -> Any:
    return jnp.asarray(RATES, float)[step]


identity = functools.partial(
    curvax.assemble, optax.identity(), weight_dimension_numbers=MATRICES, others=optax.sgd(0.1)
)


class Case(NamedTuple):
    """A value, and its transcription: the weights after each step, from updates and weights."""

    weights: Any
    theirs: Callable[..., Any]
    settings: Mapping[str, Any] = MappingProxyType({})
    rms: float | None = None  # of a sphere; the transcription has a radius


def recorded(updates: Any, W: Any, *, learning_rates: Any) -> list[Any]:
    """Steps 6 and 7 of `reference.record_46`, kernels stored inputs by outputs."""
    found = []
    for D, rate in zip(updates, learning_rates, strict=True):
        u = floored(brake_update(D, W), W, 0.3825, "column")
        W = pinned_step(W, u, rate) * (1 - rate * 0.5 * (u * W > 0))
        found.append(W)
    return found


def cautious_on_a_sphere(updates: Any, W: Any, *, learning_rates: Any) -> list[Any]:
    """The decay comes before the projection, and its mask is of the direction."""
    found, R = [], frobenius(W)
    for D, rate in zip(updates, learning_rates, strict=True):
        V = W - rate * R * D / frobenius(D) - rate * 0.5 * (D * W >= 0) * W
        W = R * V / frobenius(V)
        found.append(W)
    return found


CASES = {
    "hyperball": Case(weights.hyperball(), hyperball),
    "hyperball with a radius": Case(weights.hyperball(0.3), hyperball, rms=0.3),
    "decay": Case(weights.decay(0.5), decay, {"weight_decay": 0.5}),
    "cautious decay of the step": Case(
        weights.decay(0.05, cautious=True, independent=True),
        decay,
        {"weight_decay": 0.05, "cautious": "at_least_zero", "by": "step"},
    ),
    "brake": Case(weights.brake(), nvidia_brake),
    "pinned brake both ways": Case(
        weights.brake(0.25, inward=0.75, pin=True),
        record_brake,
        {"outward": 0.25, "inward": 0.75},
    ),
    "pin": Case(weights.brake(1, pin=True), record_brake, {"outward": 1.0}),
    **{
        f"floor of a {unit}": Case(
            weights.floor(1.5, unit=unit), floor, {"share": 1.5, "unit": unit}
        )
        for unit in ("matrix", "row", "column")
    },
    "brake, floor and pin": Case(
        weights.chain(weights.brake(pin=True), weights.floor(1.5, unit="row")),
        record_brake,
        {"floor": lambda u, W: floored(u, W, 1.5, "row")},
    ),
    "the record": Case(
        weights.chain(
            weights.brake(0.5, pin=True),
            weights.floor(0.3825, unit="column"),
            weights.decay(0.5, cautious=True, moved=True),
        ),
        recorded,
    ),
    "decay before a sphere": Case(
        weights.chain(weights.decay(0.5, cautious=True), weights.hyperball()), cautious_on_a_sphere
    ),
}
PLAIN = Case(None, decay, {"weight_decay": 0.0})
OWN_SPHERE = ("hyperball", "decay before a sphere")
"""Cases whose transcriptions keep weights of zero."""


def weights_of(dtype: Any = np.float64) -> dict[str, Any]:
    return gradients_like({n: np.zeros(s, dtype) for n, s in SHAPES.items()}, 1, seed=3)[0]


def updates_of(params: Any, steps: int = STEPS) -> list[Any]:
    """Some outward and some inward, of lengths that jump."""
    found = []
    for t, g in enumerate(gradients_like(params, steps, seed=4)):
        lean = (0.0, 0.6, -0.6)[t % 3]
        found.append({n: 2.0 ** (t * 7 % 5 - 3) * (g[n] + lean * params[n]) for n in g})
    return found


def path(optimizer: Any, params: Any, updates: list[Any]) -> list[Any]:
    """The weights after each step."""
    return steps_of(weights_of_steps(optimizer, params, updates))


def their_path(case: Case, params: Any, updates: list[Any], rates: Any = RATES) -> list[Any]:
    found = [{n: np.zeros_like(w) for n, w in params.items()} for _ in updates]
    for name, w in params.items():
        for i in np.ndindex(w.shape[:-2]):
            own = [u[name][i] for u in updates]
            more = {} if case.rms is None else {"radius": case.rms * np.sqrt(w[i].size)}
            theirs = case.theirs(own, w[i], learning_rates=rates, **case.settings, **more)
            for t, x in enumerate(theirs):
                found[t][name][i] = x
    return found


@pytest.mark.parametrize("name", CASES)
def test_weights_follow_the_transcription(name: str) -> None:
    case = CASES[name]
    with jax.enable_x64(True):
        params = weights_of()
        updates = updates_of(params)
        optimizer = identity(schedule, weights=case.weights)
        found = path(optimizer, params, updates)
        assert_close(found, their_path(case, params, updates), 256)
        others = {**PLAIN._asdict(), "weights": None}
        assert not np.allclose(
            found[-1]["wide"], their_path(Case(**others), params, updates)[-1]["wide"], rtol=1e-3
        )
        if name not in OWN_SPHERE:
            zeros = {n: 0 * w for n, w in params.items()}
            # Outward: a step back to almost 0 keeps the rounding of the weights before it.
            outward = [{n: w + u[n] / 8 for n, w in params.items()} for u in updates]
            found = path(optimizer, zeros, outward)
            assert_close(found, their_path(case, zeros, outward), 256)
            assert all(np.abs(x).max() > 0 for x in found[0].values())


@pytest.mark.parametrize("pinned", [False, True])
def test_weights_of_zero_get_the_sphere_of_their_first_step(pinned: bool) -> None:
    """Behind a pin too, which alone leads from 0 to almost 0."""
    sphere = weights.hyperball()
    side = weights.chain(weights.brake(pin=True), sphere) if pinned else sphere
    params = {n: 0 * w for n, w in weights_of(np.float32).items()}
    updates = updates_of(weights_of(np.float32))

    def waits(step: Any) -> Any:
        return jnp.where(step > 1, 0.1, 0.0)

    found = path(identity(waits, weights=side), params, updates)
    assert all(not x.any() for x in found[1].values())
    assert_close(found[2], {n: np.float32(-0.1) * u for n, u in updates[2].items()})
    for t in range(3, STEPS):
        norms = [jax.tree.map(lambda x: np.linalg.norm(x, axis=(-2, -1)), found[s]) for s in (2, t)]
        assert_close(*norms, 64)
        turned = {n: np.abs(x - found[2][n]).max() for n, x in found[t].items()}
        assert min(turned.values()) > 1e-3 * min(np.abs(x).max() for x in found[2].values())


def test_decay_of_adamc_is_a_schedule_of_the_decay() -> None:
    case = Case(None, decay, {"weight_decay": 0.5, "by": "corrected"})
    with jax.enable_x64(True):
        params = weights_of()
        updates = updates_of(params)
        corrected = curvax.inject_hyperparams(identity, hyperparam_dtype=np.float64)(
            schedule,
            weights=weights.decay(0.5),
            weights_weight_decay=lambda step: 0.5 * schedule(step) / PEAK,
        )
        assert_close(path(corrected, params, updates), their_path(case, params, updates), 256)


# Where it acts


def momentum_of(updates: list[Any]) -> list[Any]:
    found, trace = [], jax.tree.map(np.zeros_like, updates[0])
    for u in updates:
        trace = {n: 0.8 * trace[n] + u[n] for n in u}
        found.append(trace)
    return found


def test_it_follows_the_update_of_a_base() -> None:
    """The base has its state there too, beside that of the direction."""
    base = functools.partial(optax.sgd, momentum=0.8)
    with jax.enable_x64(True):
        params = weights_of()
        updates = updates_of(params)
        for name in ("hyperball", "pinned brake both ways", "floor of a row"):
            case = CASES[name]
            found = path(identity(0.2, base=base, weights=case.weights), params, updates)
            theirs = their_path(case, params, momentum_of(updates), np.full(STEPS, 0.2))
            assert_close(found, theirs, 256)


def test_each_head_and_each_scanned_layer_keeps_its_norm() -> None:
    shape = {"layers/query": np.zeros((3, 6, 2, 4), np.float32)}  # layers, inputs, heads, outputs
    params = gradients_like(shape, 1)[0]
    axes = {"*query": curvax.MatrixAxes(rows=1, columns=3)}
    optimizer = curvax.muon(0.1, weight_dimension_numbers=axes, weights=weights.hyperball())
    found = path(optimizer, params, gradients_like(shape, 4, seed=1))[-1]["layers/query"]
    norms = [np.linalg.norm(x, axis=(1, 3)) for x in (found, params["layers/query"])]
    assert norms[0].shape == (3, 2)
    assert_close(*norms, 32)
    assert not np.allclose(found, params["layers/query"], atol=1e-2)


SIDE = weights.chain(
    weights.brake(inward=0.5),
    weights.brake(pin=True),
    weights.floor(0.5),
    weights.floor(0.6, unit="row"),
    weights.floor(0.7, unit="column"),
    weights.decay(0.1, cautious=True, moved=True),
    weights.decay(0.01, independent=True),
)
"""All values but spheres."""


@pytest.mark.parametrize(("kind", "side"), [("auto", SIDE), ("explicit", weights.hyperball(0.3))])
def test_on_a_mesh_it_does_what_it_does_on_one_device(kind: str, side: Any) -> None:
    """Three matrices of a shape on two devices, each of which has some columns of all."""
    mesh = mesh_of(kind, 2)
    params, gradients = given({f"{i}/kernel": (4, 6) for i in range(3)})
    place = functools.partial(on, mesh, specs=dict.fromkeys(params, P(None, "x")))
    alone = run_scanned(curvax.muon(schedule, weights=side), gradients, params)[0]
    optimizer = curvax.muon(schedule, weights=side, mesh=mesh)
    found, _ = steps(optimizer, [place(g) for g in gradients], place(params), mesh)
    assert_close(found, alone, 64)


@pytest.mark.parametrize("side", [SIDE, weights.hyperball()])
def test_layers_that_are_updated_on_the_way_have_it_too(side: Any) -> None:
    layers = {
        "kernel": 0.3 * gradients_like({"kernel": np.zeros((3, 4, 4), np.float32)}, 1)[0]["kernel"]
    }
    optimizer = curvax.muon(
        schedule,
        weights=side,
        weight_dimension_numbers={"kernel": curvax.MatrixAxes(rows=1, columns=2)},
    )
    state, x = optimizer.init(layers), jnp.linspace(-1, 1, 4)

    def block(layer: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ layer["kernel"])

    def loss(layers: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0] ** 2)

    updates, _ = optimizer.update(jax.grad(loss)(layers), state, layers)
    output, backward = curvax.layerwise(block, optimizer, layers, state, x)
    found, _, _ = backward(2 * output)
    assert_close(found, optax.apply_updates(layers, updates), 64)


@pytest.mark.parametrize("method", [curvax.muon, functools.partial(curvax.galore, rank=2)])
def test_a_matrix_with_a_bad_gradient_does_not_move(method: Any) -> None:
    """Not by its decay either, if the guard is around the whole step."""
    params = weights_of(np.float32)
    (good,) = updates_of(params, 1)
    bad = {**good, "batch": good["batch"].at[1, 0, 0].set(jnp.nan)}
    optimizer = method(0.1, weights=SIDE, weight_dimension_numbers=MATRICES)
    before, after = path(optimizer, params, [good, bad])
    assert np.isfinite(after["batch"]).all()
    assert not np.array_equal(after["batch"][0], before["batch"][0])
    if method is curvax.muon:
        assert np.array_equal(after["batch"][1], before["batch"][1])

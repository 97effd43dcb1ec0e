"""Shampoo with every kind of refresh policy, and what its state counts."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from tests.helpers import at
from tests.shared.factors import factors_of

STEPS = 17
EPS, LARGEST = 2.0**-5, 2.0**-2  # beside factors of size 1
SHAPES = {"w": (3, 4, 6)}
FACTORS = 3  # on the left alone, which is all that most tests need
COUNTERS = ("checks", "refreshes", "rejected")


def shampoo(refresh, **settings):
    defaults = {"eps": EPS, "root": 2, "b2": 0.8, "damping_mode": "absolute", "initial": 0.0}
    defaults |= {"statistics_every": 1, "graft": None, "side": "left"}
    return curvax.scale_by_shampoo(refresh=refresh, **{**defaults, **settings})


def quiet_gradients(shapes=SHAPES, steps=STEPS, seed=0) -> dict[str, np.ndarray]:
    """Gradients that are quiet at times, so that policies sometimes refresh and sometimes not."""
    random = np.random.default_rng(seed)
    calm = np.where(np.arange(steps) % 8 < 4, 1.0, 0.02)

    def drawn(shape):
        sign = random.choice([-1.0, 1.0], (steps, *shape[:-2], 1, 1))
        noise = calm.reshape(-1, *[1] * len(shape)) * random.standard_normal((steps, *shape))
        return np.asarray(0.6 * (sign * random.standard_normal(shape) + noise), np.float32)

    return {name: drawn(shape) for name, shape in shapes.items()}


def stepped(transformation, gradients):
    """Updates and states, from a jitted step at a time, which is traced anew."""
    update = jax.jit(lambda g, s: transformation.update(g, s))
    state = jax.jit(transformation.init)(at(gradients, 0))
    for t in range(len(next(iter(gradients.values())))):
        direction, state = update(at(gradients, t), state)
        yield direction, state


def number_of(state, field: str) -> int:
    return sum(int(np.sum(getattr(f, field))) for f in factors_of(state))


def drain(log) -> collections.Counter[int]:
    jax.effects_barrier()
    seen = log.copy()
    log.clear()
    return seen


@dataclasses.dataclass(frozen=True)
class TraceGrowth(curvax.policies.RefreshPolicy):
    """Refreshes a factor whose trace has changed by more than a factor; else damps it twice."""

    schedule: curvax.policies.Every
    growth: float
    max_damping = float("inf")
    examines = "damping"

    def examine(self, check: curvax.policies.Check) -> curvax.policies.Verdict:
        ratio = jnp.trace(check.statistic) / jnp.sum(jnp.maximum(check.eigenvalues, 0))
        changed = (ratio > self.growth) | (ratio < 1 / self.growth)
        assert check.root_damping is not None
        damping = 2 * check.root_damping.damping
        return curvax.policies.Verdict(check.first | changed, ratio, damping)


@dataclasses.dataclass(frozen=True)
class TwiceAtFirst(curvax.policies.RefreshPolicy):
    """Refreshes at steps 1 and 2 and never again: a schedule of one's own."""

    examines = None

    @property
    def schedule(self):
        return curvax.every(10**6, offset=2, first=True)

    def examine(self, check):
        raise AssertionError("not asked, since it examines nothing")


POLICIES = {
    "every": curvax.every(3),
    "every, not at first": curvax.every(4, first=False),
    "every, offset": curvax.every(4, offset=3),
    "every, doubling at first": curvax.every(7, first="doubling"),
    "every, staggered": curvax.every(3, stagger=True),
    "FOAM": curvax.policies.foam(2, 0.4, LARGEST),
    "FOAM, staggered": curvax.policies.foam(3, 0.4, LARGEST, stagger=True),
    "FOAM, not adaptive": curvax.policies.foam(2, 0.4, LARGEST, adaptive_damping=False),
    "FOAM, no refreshes": curvax.policies.foam(2, 0.4, LARGEST, refreshes=False),
    "DR": curvax.policies.diagonal_residual(2, 0.2),
    "DR, staggered": curvax.policies.diagonal_residual(3, 0.2, stagger=True),
    "a user's": TraceGrowth(curvax.every(2, offset=1), 1.3),
    "a user's schedule": TwiceAtFirst(),
}

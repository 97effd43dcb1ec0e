"""Two problems that are not deep learning's usual: factors of a matrix, a differential equation.

Both are ill-conditioned, and neither overfits: the loss is how well the optimizer does its work.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from .._training import Task

ORDER, RANK, CONDITION = 256, 16, 1e3
ENTRIES = 4096  # of the matrix in a batch
POINTS = 256  # of the square in a batch
WIDTH, LAYERS = 64, 3
WAVES = (1, 4)  # of the solution, along the two axes


def orthonormal(key: jax.Array) -> jax.Array:
    """Columns."""
    return jnp.linalg.qr(jax.random.normal(key, (ORDER, RANK)))[0]


def factorization(steps: int) -> Task:
    """`A Bᵀ` for a matrix of rank 16 and condition number 1000, from some entries a step."""
    left, right = (orthonormal(key) for key in jax.random.split(jax.random.key(7)))
    values = jnp.geomspace(1.0, 1 / CONDITION, RANK)
    target = left * values @ right.T
    target = target / jnp.sqrt(jnp.mean(target**2))

    def params(key: jax.Array) -> Any:
        a, b = (jax.random.normal(k, (ORDER, RANK)) for k in jax.random.split(key))
        return {"left": {"kernel": 0.1 * a}, "right": {"kernel": 0.1 * b}}

    def batches(seed: int) -> jax.Array:
        return jax.random.randint(jax.random.key(seed), (steps, ENTRIES), 0, ORDER**2)

    def loss_of(params: Any, target: jax.Array, places: jax.Array) -> jax.Array:
        rows, columns = places // ORDER, places % ORDER
        a, b = params["left"]["kernel"][rows], params["right"]["kernel"][columns]
        return jnp.mean((jnp.sum(a * b, 1) - target[rows, columns]) ** 2)

    def evaluate(params: Any) -> jax.Array:
        found = params["left"]["kernel"] @ params["right"]["kernel"].T
        return 0.5 * jnp.log10(jnp.mean((found - target) ** 2))

    return Task(
        sizes={"steps": steps},
        data=target,
        params=params,
        batches=batches,
        loss_of=loss_of,
        evaluate=jax.jit(evaluate),
        evaluations=10,
    )


def solution(point: jax.Array) -> jax.Array:
    """The function that the network has to find."""
    return jnp.sin(WAVES[0] * jnp.pi * point[0]) * jnp.sin(WAVES[1] * jnp.pi * point[1])


def network(params: Any, point: jax.Array) -> jax.Array:
    """A perceptron times a function that is zero on the boundary."""
    x = point
    for name in sorted(params):
        x = x @ params[name]["kernel"] + params[name]["bias"]
        if name != max(params):
            x = jnp.tanh(x)
    return x[0] * jnp.prod(point * (1 - point)) * 16


def laplacian(params: Any, point: jax.Array) -> jax.Array:
    """The Laplacian of the network."""
    return jnp.trace(jax.hessian(network, argnums=1)(params, point))


def equation(steps: int) -> Task:
    """A physics-informed network for Poisson's equation on the unit square."""
    sizes = (2, *[WIDTH] * LAYERS, 1)
    factor = (WAVES[0] ** 2 + WAVES[1] ** 2) * jnp.pi**2
    grid = jnp.linspace(0, 1, 33)
    nodes = jnp.stack(jnp.meshgrid(grid, grid), -1).reshape(-1, 2)

    def params(key: jax.Array) -> Any:
        found = {}
        for i, (m, n) in enumerate(itertools.pairwise(sizes)):
            kernel = jax.random.normal(jax.random.fold_in(key, i), (m, n)) / m**0.5
            found[f"layer_{i}"] = {"kernel": kernel, "bias": jnp.zeros(n)}
        return found

    def loss_of(params: Any, data: jax.Array, key: jax.Array) -> jax.Array:
        points = jax.random.uniform(jax.random.wrap_key_data(key), (POINTS, 2))
        residual = jax.vmap(lambda p: laplacian(params, p) / factor + solution(p))(points)
        return jnp.mean(residual**2)

    def evaluate(params: Any) -> jax.Array:
        found, right = (jax.vmap(f)(nodes) for f in (lambda p: network(params, p), solution))
        return 0.5 * jnp.log10(jnp.mean((found - right) ** 2) / jnp.mean(right**2))

    def batches(seed: int) -> jax.Array:
        return jax.random.key_data(jax.random.split(jax.random.key(seed), steps))

    return Task(
        sizes={"steps": steps},
        data=jnp.zeros(()),
        params=params,
        batches=batches,
        loss_of=loss_of,
        evaluate=jax.jit(evaluate),
        evaluations=10,
    )

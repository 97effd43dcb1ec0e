r"""Weights beside those that take steps: averages to evaluate, and points ahead for gradients.

Parameters are where gradients are taken. `eval_params` computes what is evaluated from them and the
state, as with `optax.contrib.schedule_free`.

*Numerics.* States are in float32 at least, and what is added to a parameter has its dtype.
Parameters in bfloat16 would lose the small changes of averages: put `master_weights` or
`kahan_summation` outside. (With `stochastic_rounding` the average of `primal_average`, which is
computed from the rounded parameters, keeps the error of every step.) *State*: one array for each
parameter.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._counts import at_step, next_step
from .._paths import named_leaves
from .._trees import map_unzip, widened
from .._validate import as_transformation, check_given, checked


class LookaheadState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    ahead: jax.Array  # β_t, by which the parameters are ahead, scalar
    step: Any  # m_t, float32 at least, in the parameters' shapes
    inner: Any  # state of the inner optimizer

    def evaluated(self, params: Any) -> Any:
        behind = jax.tree.map(lambda p, m: _added(p, -self.ahead * m), params, self.step)
        return eval_params(self.inner, behind)


class PrimalAverageState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    share: jax.Array  # μ_y of the parameters, scalar
    z: Any  # Z_t, float32 at least, in the parameters' shapes
    inner: Any  # state of the inner optimizer

    def evaluated(self, params: Any) -> Any:
        x = lambda y, z: _average_of(y, z, self.share).astype(y.dtype)  # noqa: E731
        return jax.tree.map(x, params, self.z)


class TailAverageState(NamedTuple):
    count: jax.Array  # t, int32 scalar
    share: jax.Array  # λ, scalar
    average: Any  # E_t, float32 at least, in the parameters' shapes
    inner: Any  # state of the inner optimizer

    def evaluated(self, params: Any) -> Any:
        weights = eval_params(self.inner, params)
        return jax.tree.map(lambda w, e: _added(w, self.share * (e - w)), weights, self.average)


OF_STATES: dict[type, tuple[str, Any]] = {
    LookaheadState: ("step", LookaheadState.evaluated),
    PrimalAverageState: ("z", PrimalAverageState.evaluated),
    TailAverageState: ("average", TailAverageState.evaluated),
    optax.contrib.ScheduleFreeState: ("z", optax.contrib.schedule_free_eval_params),
}
"""What states hold of parameters, and how they compute the weights that are evaluated from both."""


def eval_params(state: Any, params: Any) -> Any:
    """The weights to evaluate and keep, from the parameters and the optimizer's state.

    These are the averages of `tail_average`, `primal_average` and `optax.contrib.schedule_free`,
    and the weights from which `ema_nesterov` looks ahead, also within further wrappers; without any
    of these, the parameters themselves.

    Args:
      state: the optimizer's state; of an `nnx.Optimizer` its `opt_state`.
      params: the parameters after the update that returned `state`; of `int8_weights` decoded, by
        `from_int8`.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: if the averages are in codes or under other names, as in `quantize_state`,
        `optax.flatten` or `flat_state`; of the last give `place_state(inner, params, state)`.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> optimizer = curvax.primal_average(optax.sgd(1.0), 0.5, mu_y=0.5)
      >>> weights = jnp.array([4.0])
      >>> state = optimizer.init(weights)
      >>> updates, state = optimizer.update(jnp.array([2.0]), state, weights)
      >>> weights = optax.apply_updates(weights, updates)
      >>> weights.tolist(), curvax.eval_params(state, weights).tolist()
      ([2.5], [3.0])
    """
    if isinstance(state, dict) and state and jax.tree_util.all_leaves(state.values()):
        raise ValueError(
            "state: a flat one does not say which arrays are averages; give that of the optimizer "
            "inside flat_state, place_state(inner, params, state)."
        )
    known = lambda node: type(node) in OF_STATES  # noqa: E731
    for node in filter(known, jax.tree.leaves(state, is_leaf=known)):
        field, evaluated = OF_STATES[type(node)]
        # By path, because a mask leaves parameters out, and NNX has boxes of its own for states.
        named, stored = named_leaves(params), named_leaves(getattr(node, field)).present()
        weights = named.present()
        unknown = [name for name in stored if name not in weights]
        if unknown:
            raise ValueError(
                f"state has an average of {unknown[0]!r}, which is no parameter: averages in codes "
                "or under other names cannot be evaluated (quantize_state or optax.flatten around "
                "them, or parameters in codes, which from_int8 decodes)."
            )
        averaged = {name: x for name, x in weights.items() if name in stored}
        new = evaluated(node._replace(**{field: stored}), averaged)
        params = named.rebuild(weights | new)
    return params


@checked
def ema_nesterov(
    inner: optax.GradientTransformation,
    beta: optax.ScalarOrSchedule = 0.3,
    *,
    gamma: jax.typing.ArrayLike = 0.99,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes each step from a point ahead, along the average of the steps before.

    .. math::

        P_t = W_t + \beta_t m_t, \qquad W_{t+1} = P_t + u_t(P_t), \qquad
        m_{t+1} = \gamma m_t + (1-\gamma)(W_{t+1} - W_t)

    with the whole step :math:`u_t` of the inner optimizer, decay included. The parameters are
    :math:`P`, and `eval_params` gives :math:`W`. The lookahead is not taken back:
    :math:`W_{t+1} - W_t` holds it too. With `beta=0` this is the inner optimizer.

    Args:
      inner: the whole optimizer, such as `curvax.muon(0.02)`.
      beta: β, or a schedule of it from step 0 on. In the record (entry 46 of track 3) it is 0.3
        times the rate of the step before over the largest, from step 300 to 1950, and 0 elsewhere.
      gamma: γ, the decay rate of the average step.

    Returns:
      An optimizer; its `update` needs parameters.

    Raises:
      ValueError: if `beta` is negative or `gamma` is not in [0, 1).

    Example:
      >>> import curvax, optax
      >>> warm = optax.linear_schedule(0.0, 0.3, transition_steps=300)
      >>> optimizer = curvax.ema_nesterov(curvax.muon(0.02), warm)

    References:
      `EMA-Nesterov: Stabilizing Nesterov's lookahead for accelerated deep learning optimization
      <https://arxiv.org/abs/2605.25395>`_, 2026.
    """
    inner = as_transformation("inner", inner)
    at = _schedule(beta)

    def init(params: Any) -> LookaheadState:
        steps = jax.tree.map(jnp.zeros_like, _copies(params))
        return LookaheadState(jnp.zeros([], jnp.int32), at(0), steps, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_given(state, params)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        count = next_step(state.count)
        ahead = at(count)

        def moved(p: jax.Array, u: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            step = (gamma * m + (1 - gamma) * (u + state.ahead * m)).astype(m.dtype)
            return _added(u, ahead * step).astype(p.dtype), step

        changes, steps = map_unzip(2, moved, params, updates, state.step)
        return changes, LookaheadState(count, ahead, steps, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def primal_average(
    inner: optax.GradientTransformation,
    mu_x: optax.ScalarOrSchedule = 0.9967,
    *,
    mu_y: jax.typing.ArrayLike = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the weights of all steps, and takes gradients between average and weights.

    .. math::

        Y_t = \mu_y X_t + (1-\mu_y) Z_t, \qquad Z_{t+1} = Z_t + u_t(Y_t), \qquad
        X_{t+1} = \mu_x X_t + (1-\mu_x) Z_{t+1}

    with the step :math:`u_t` of the inner optimizer, which gets :math:`Z_t` for its parameters, so
    that :math:`Z` decays. The parameters are :math:`Y`, the state keeps :math:`Z`, and
    `eval_params` gives :math:`X`. With :math:`\mu_x = 1 - 1/(t+1)` this is Schedule-Free.

    Around it for weights in bfloat16: `master_weights` or `kahan_summation`. With
    `stochastic_rounding` :math:`X` keeps the rounding of every step.

    Args:
      inner: the whole optimizer, without momentum of its own.
      mu_x: in [0, 1), or a schedule of it from step 0 on.
      mu_y: in (0, 1].

    Returns:
      An optimizer; its `update` needs parameters.

    Raises:
      ValueError: if an argument is not in its range.

    Example:
      >>> import curvax
      >>> optimizer = curvax.primal_average(curvax.muon(0.02, b1=0.0), mu_y=0.9)

    References:
      `Smoothing DiLoCo with primal averaging for faster training of LLMs
      <https://arxiv.org/abs/2512.17131>`_, 2025.
    """
    inner = as_transformation("inner", inner)
    at = _schedule(mu_x)

    def init(params: Any) -> PrimalAverageState:
        count, share = jnp.zeros([], jnp.int32), jnp.asarray(mu_y, float)
        return PrimalAverageState(count, share, _copies(params), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_given(state, params)
        at_z = jax.tree.map(lambda p, z: z.astype(p.dtype), params, state.z)
        updates, inner_state = inner.update(updates, state.inner, at_z, **extra_args)
        kept, share = at(state.count), jnp.asarray(mu_y, float)

        def moved(y: jax.Array, u: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, z = _average_of(y, z, state.share), z + u.astype(z.dtype)
            x = kept * x + (1 - kept) * z
            return (share * x + (1 - share) * z - y).astype(y.dtype), z

        changes, z = map_unzip(2, moved, params, updates, state.z)
        return changes, PrimalAverageState(next_step(state.count), share, z, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def tail_average(
    inner: optax.GradientTransformation,
    start: int,
    *,
    tau: jax.typing.ArrayLike = 150.0,
    share: jax.typing.ArrayLike = 0.6,
    end: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the weights of the last steps, for evaluation alone: training does not see it.

    .. math::

        E_s = W_s, \qquad E_t = E_{t-1} + (W_t - E_{t-1}) / \tau \quad (s < t < e), \qquad
        W_t + \lambda (E_t - W_t)

    for the weights after step `t = 1, 2, …`, the start `s` and the end `e`, from which on
    :math:`E` is kept. `eval_params` gives the last expression; until the start it is :math:`W_t`.
    Around `ema_nesterov` and the other wrappers :math:`W` is what these evaluate. To leave
    parameters out, put `optax.masked(curvax.tail_average(optax.identity(), start), mask)` behind
    the optimizer in a chain; there W are the parameters.

    Args:
      inner: the whole optimizer.
      start: s.
      tau: τ, at least 1.
      share: λ, in [0, 1].
      end: e; `None` is never.

    Returns:
      An optimizer; its `update` needs parameters.

    Raises:
      ValueError: if an argument is not in its range.

    Example:
      >>> import curvax
      >>> optimizer = curvax.tail_average(curvax.muon(0.02), start=2400)

    References:
      Entries 45 and 46 of track 3 of `modded-nanogpt
      <https://github.com/KellerJordan/modded-nanogpt>`_, 2026, with τ of 150 and λ of 0.6.
    """
    inner = as_transformation("inner", inner)
    if isinstance(start, int) and isinstance(end, int) and end <= start:
        raise ValueError(f"end must be above start={start}, got {end}.")

    def init(params: Any) -> TailAverageState:
        count, mixed = jnp.zeros([], jnp.int32), jnp.asarray(share, float)
        return TailAverageState(count, mixed, _copies(params), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_given(state, params)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        moved = optax.apply_updates(params, updates)
        count = next_step(state.count)
        running = True if end is None else count < end

        def averaged(w: jax.Array, e: jax.Array) -> jax.Array:
            w = w.astype(e.dtype)
            new = jnp.where(count <= start, w, e + jnp.where(running, (w - e) / tau, 0))
            return new.astype(e.dtype)

        average = jax.tree.map(averaged, eval_params(inner_state, moved), state.average)
        mixed = jnp.asarray(share, float)
        return updates, TailAverageState(count, mixed, average, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _schedule(value: optax.ScalarOrSchedule) -> Any:
    return lambda count: jnp.asarray(at_step(value, count), float)


def _copies(params: Any) -> Any:
    """Copies of parameters in float32 at least, so that both may be donated."""
    return jax.tree.map(lambda p: jnp.array(p, copy=True), widened(params))


def _average_of(y: jax.Array, z: jax.Array, share: jax.Array) -> jax.Array:
    """X, from Y = share · X + (1 - share) · Z."""
    return y + (1 - share) / share * (y - z)


def _added(p: jax.Array, change: jax.Array) -> jax.Array:
    return (p + change).astype(p.dtype)

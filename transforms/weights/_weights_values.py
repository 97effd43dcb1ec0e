r"""The values of `weights=`: spheres, decay, brakes, floors.

The docstrings have the formulas and sources; track 3 is that of KellerJordan/modded-nanogpt.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._validate import check_fields
from ..directions._weight_decay import shrinking
from ..linalg._numerics import inner_products, safe_norm
from ._weight_norms import at_norm, lengths, long_as
from ._weights_side import Weights

SMALLEST, SMALLEST_SQUARE = 1e-8, 1e-12
"""Lengths, and squares, below count as this, as in the sources of `floor` and of `brake(pin=)`."""

AXES = {"matrix": (-2, -1), "row": -1, "column": -2}
"""The axes over which a unit of `floor` has its length."""


@dataclasses.dataclass(frozen=True)
class Hyperball(Weights):
    rms: Any = None
    rescales = True
    forgets = True

    __post_init__ = check_fields

    def _radius(self, w: jax.Array) -> jax.Array:
        if self.rms is None:
            return lengths(w)
        *batch, m, n = w.shape
        return jnp.full((*batch, 1, 1), self.rms * math.sqrt(m * n), w.dtype)

    def before(self, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        return long_as(step, self._radius(w), rate)

    def after(self, update: jax.Array, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        radius = self._radius(w)
        # Without a radius it is the plain step, where a pin in front leads to almost 0.
        return at_norm(jnp.where(radius > 0, update, step), w, radius)


@dataclasses.dataclass(frozen=True)
class Decay(Weights):
    weight_decay: Any = 0.0
    cautious: bool = False
    independent: bool = False
    moved: bool = False

    __post_init__ = check_fields

    def after(self, update: jax.Array, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        lost = (w + update if self.moved else w) * self.weight_decay
        lost = lost if self.independent else lost * rate
        return update - (jnp.where(shrinking(-step, w), lost, 0) if self.cautious else lost)


@dataclasses.dataclass(frozen=True)
class Brake(Weights):
    outward: Any = 0.5
    inward: Any = 1.0
    pin: bool = False

    __post_init__ = check_fields

    @property
    def rescales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.pin

    def _share(self, growth: jax.Array) -> jax.Array:
        return jnp.where(growth > 0, self.outward, self.inward).astype(growth.dtype)

    def before(self, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        if not self.pin:
            return step
        along = inner_products(step, w)
        radial = w * (along / jnp.maximum(inner_products(w, w), SMALLEST_SQUARE))
        return step + (self._share(along) - 1) * radial

    def after(self, update: jax.Array, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        norm = lengths(w)
        if self.pin:
            norm = jnp.maximum(norm, SMALLEST)
            pinned = norm + inner_products(update, w) / norm
            return at_norm(update, w, jnp.maximum(pinned, SMALLEST))
        moved = w + update
        reached = lengths(moved)
        # |W + Δ|² - |W|², which rounds less than the difference of the norms.
        squares = 2 * inner_products(update, w) + inner_products(update, update)
        positive = reached > 0
        growth = jnp.where(positive, squares / jnp.where(positive, reached + norm, 1), 0)
        missing = (self._share(growth) - 1) * growth
        return update + moved * (missing / jnp.where(positive, reached, 1))


@dataclasses.dataclass(frozen=True)
class Floor(Weights):
    share: Any = 0.3825
    unit: str = "matrix"

    __post_init__ = check_fields

    @property
    def rescales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.unit == "matrix"

    def before(self, step: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
        least, length = (safe_norm(x, axis=AXES[self.unit], keepdims=True) for x in (w, step))
        least = self.share * rate * jnp.maximum(least, SMALLEST)
        length = jnp.maximum(length, rate * SMALLEST)
        return step * jnp.maximum(least / jnp.where(length > 0, length, 1), 1)


def hyperball(rms: jax.typing.ArrayLike | None = None) -> Hyperball:
    r"""Keeps each matrix on a sphere, on which a step turns it by the learning rate.

    .. math::
      W \leftarrow R\, N(W - \eta R\, N(D)), \qquad N(X) = X / \|X\|

    with Frobenius norms: `scale_by_weight_norm` before the learning rate, `keep_weight_norm` after
    it. The scale of `D` has no effect, and there is nothing to decay. Norms drift by the rounding
    of the weights: in bfloat16, wrap the optimizer as `docs/bfloat16.md` says.

    *Zero weights.* With `rms` their first step leads to the sphere, as that of all weights. Without
    it, their first step other than zero is that of plain descent, :math:`-\eta D`, and they keep
    its length from then on. With a warm-up this is too short: give `rms`, or another start.

    Args:
      rms: the root mean square of the entries on the sphere, :math:`R = \mathrm{rms} \sqrt{mn}`;
        `None` is the norm that each matrix has.

    Raises:
      ValueError: if `rms` is not positive.

    Example:
      >>> import curvax
      >>> optimizer = curvax.muon(0.02, weights=curvax.weights.hyperball())

    References:
      Wen et al., `Hyperball optimization <https://arxiv.org/abs/2606.16899>`_, 2026.
    """
    return Hyperball(rms)


def decay(
    weight_decay: jax.typing.ArrayLike,
    *,
    cautious: bool = False,
    independent: bool = False,
    moved: bool = False,
) -> Decay:
    r"""Decoupled weight decay of the matrices.

    .. math::
      W' = W - \eta D - r \lambda\, m \odot W, \qquad
      r = \eta \text{ or } 1, \qquad m = 1 \text{ or } \mathbb 1[D \odot W \ge 0]

    `weights=decay(0.1)` is what `weight_decay=0.1` does to matrices. In a chain, `D` of the mask is
    the direction as `before` leaves it.

    Decay on the schedule, but independent of its peak, is `decay(0.1 / peak)` (Loshchilov and
    Hutter, arXiv:1711.05101); with `independent`, it follows neither. That of AdamC,
    :math:`r = \eta^2 / \eta_{\max}` (arXiv:2506.02285), is
    `curvax.inject_hyperparams(curvax.muon)(rate, weights=curvax.weights.decay(0.1),
    weights_weight_decay=lambda step: 0.1 * rate(step) / peak)`. Zero weights do not decay, but with
    `moved` and without `cautious` what their step reaches does.

    Args:
      weight_decay: λ.
      cautious: whether only entries decay that the step makes smaller anyway, or does not change.
      independent: whether r is 1, so that the learning rate does not multiply the decay.
      moved: whether the weights that the step reaches decay, :math:`W' \leftarrow W' - r \lambda\,
        m \odot W'`, as behind the pin in the record of modded-nanogpt's track 3 (#46).

    Raises:
      ValueError: if `weight_decay` is negative.

    Example:
      >>> import curvax
      >>> optimizer = curvax.muon(0.02, weights=curvax.weights.decay(0.1, cautious=True))

    References:
      Chen et al., `Cautious weight decay <https://arxiv.org/abs/2510.12402>`_, 2025, Algorithm 1.
    """
    return Decay(weight_decay, cautious, independent, moved)


def brake(
    outward: jax.typing.ArrayLike = 0.5, *, inward: jax.typing.ArrayLike = 1.0, pin: bool = False
) -> Brake:
    r"""Multiplies the growth of a matrix's norm by a number.

    That of NVIDIA scales the weights :math:`V = W - \eta D` that the step reaches:

    .. math::
      W' = V\, (\|W\| + s\, (\|V\| - \|W\|)) / \|V\|

    with `s = outward` where the norm grows, and `inward` where it shrinks. It also brakes the
    growth by tangential steps, of second order in η.

    With `pin`, that of modded-nanogpt's track 3 (#29): the radial part of the direction is
    multiplied by s, and then the norm is pinned to where the radial part leads in first order, so
    that tangential steps do not add to it.

    .. math::
      D \leftarrow D + (s - 1)\, c\, W, \quad c = \langle D, W \rangle / \|W\|^2, \qquad
      W' = V\, (\|W\| + \langle V - W, W \rangle / \|W\|) / \|V\|

    In a chain, the parts behind it change `D` between brake and pin. `brake(1)` brakes nothing;
    `brake(1, pin=True)` still pins.

    *Zero weights.* Without `pin` they leave zero with the length :math:`\text{outward} \cdot \eta
    \|D\|`. With `pin` the norm counts as at least 1e-8: they leave zero to this norm first, and
    grow from there while `D` keeps pointing outward, by the braked radial part.

    Args:
      outward: s where the norm grows.
      inward: s where it shrinks.
      pin: which of the two brakes.

    Raises:
      ValueError: if `outward` is not positive, or `inward` is negative.

    Example:
      >>> import curvax
      >>> optimizer = curvax.muon(0.02, weights=curvax.weights.brake(0.5))

    References:
      Emerging-Optimizers, `weight_update_hooks/radial_brake.py`; modded-nanogpt, track 3,
      `20260511_dampen_radial_gradient_component`.
    """
    return Brake(outward, inward, pin)


def floor(share: jax.typing.ArrayLike, *, unit: str = "matrix") -> Floor:
    r"""Lengthens directions that are shorter than a share of their weights.

    .. math::
      D \leftarrow D \cdot \max(1, c\, \|W\| / \|D\|)

    before the rate: a step is at least :math:`c\, \eta\, \|W\|` long. A direction of 0 stays 0.

    Zero weights leave zero by the step alone. (Both norms count as at least 1e-8.)

    Args:
      share: c; 0.35 in #9 of modded-nanogpt's track 3, 0.3825 in #46.
      unit: what has a length: the "matrix" (#9), each "row", or each "column". Columns are the
        outputs of a kernel `(in, out)`, which #46 calls rows.

    Raises:
      ValueError: if `share` is not positive, or `unit` is unknown.

    Example:
      >>> import curvax
      >>> optimizer = curvax.muon(0.02, weights=curvax.weights.floor(0.3825, unit="column"))

    References:
      modded-nanogpt, track 3, `20260501_skylight001` (#9), `20260619_cwd_rowfloor_tailema` (#46).
    """
    return Floor(share, unit)


WEIGHTS = {"hyperball": Hyperball(), "brake": Brake(), None: None}
"""The values without arguments, by name."""

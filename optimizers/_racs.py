r"""RACS: row- and column-scaled SGD."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..transforms.directions._norm_growth import limit_norm_growth
from ..transforms.directions._row_column_scaling import scale_by_rows_and_columns
from ..transforms.matrices._matrix_rule import Matrices, as_rule
from ..transforms.state._inject import scheduled
from ..transforms.weights._weights_side import Weights
from ._assemble import Decay, MeshAxis, MeshLike, assemble


@scheduled
def scale_by_racs(
    *,
    b2: Decay = 0.9,
    scale: jax.typing.ArrayLike = 0.05,
    gamma: jax.typing.ArrayLike = 1.01,
    iterations: int = 5,
    bias_correction: bool = False,
    limit: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformation:
    """The direction of `racs` on batches of matrices `(..., m, n)`.

    `racs` documents the arguments.
    """
    longest: Any = 1 / (1 - b2) if limit is None else limit  # pyright: ignore
    return optax.chain(
        # Algorithm 1: lines 5-8, lines 9-10, and α of line 11.
        scale_by_rows_and_columns(
            b2, iterations=iterations, bias_correction=bias_correction, limit=longest
        ),
        limit_norm_growth(gamma),
        optax.scale(scale),  # pyright: ignore[reportArgumentType]
    )


def racs(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b2: Decay = 0.9,
    scale: jax.typing.ArrayLike = 0.05,
    gamma: jax.typing.ArrayLike = 1.01,
    iterations: int = 5,
    bias_correction: bool = False,
    limit: jax.typing.ArrayLike | None = None,
    matrices: Matrices = None,
    weight_dimension_numbers: Any = None,
    mesh: MeshLike = None,
    mesh_axis: MeshAxis = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    weights: str | Weights | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""RACS: rows and columns scaled to the principal singular pair of the squared gradient.

    Use it when memory is short: its state is `m + n + 1` numbers per matrix, and a step costs ten
    passes over the gradient and no matrix product. It has no momentum and therefore suffers more
    from small batches than other methods.

    Start with 16 times a tuned AdamW's learning rate.

    .. math::
      s = \frac{(G^{\odot 2})^\top q}{\|q\|^2}, \quad q = \frac{G^{\odot 2} s}{\|s\|^2}
      \quad (\text{five rounds from } q = 1), \qquad
      \bar s \leftarrow b_2 \bar s + (1 - b_2) s, \quad \bar q \leftarrow b_2 \bar q + (1 - b_2) q

    .. math::
      \tilde G = \mathrm{diag}(\bar q)^{-1/2}\, G\, \mathrm{diag}(\bar s)^{-1/2}, \qquad
      D = \alpha\, \eta\, \tilde G, \quad
      \eta = \gamma / \max(\|\tilde G\| / \phi, \gamma), \quad \phi \leftarrow \eta \|\tilde G\|

    As in the paper, the averages start at 0 and are not bias-corrected. Zero rows and columns stay
    zero. The limiter does nothing while :math:`\phi = 0`, and where squared gradients have blocks,
    are triangular or have heavy tails, the paper's first update has entries of 1e4 to 1e12 times
    the learning rate. Here root mean squares are limited before α, by default to `1 / (1 - b2)`,
    that of a first step in which :math:`G^{\odot 2}` has rank 1: the longest update of a matrix is
    `learning_rate · α √(mn) / (1 - b2)`, and the limiter begins there. Embeddings, norms, biases
    and the output layer go to AdamW.

    Relations, each with a test of the same name: without averaging (`b2 = 0`) and with many
    iterations the scales are the leading singular pair of :math:`G^{\odot 2}`; with `b2 = 0` the
    direction does not depend on the gradient's scale.

    Args:
      learning_rate: a number or a schedule.
      b2: decay rate of the two averages; 0 is the paper's ablation without them.
      scale: the paper's α (0.02 at 1.3B parameters).
      gamma: largest growth of the direction's norm from one step to the next.
      iterations: rounds of the fixed point.
      bias_correction: whether to correct the averages for their start at 0 (not in the paper).
      limit: largest root mean square of the direction before α and the limiter; longer ones are
        shortened. `None` is `1 / (1 - b2)`; infinity is the paper's form.
      matrices: see `muon`. The output layer goes to AdamW; `MatrixRule(output_layer=None)` makes
        it a matrix.
      weight_dimension_numbers, mesh, mesh_axis, weight_decay_mask, weights, adam_learning_rate,
        others: see `muon`.
      weight_decay: decoupled, multiplied by the learning rate: with ten times AdamW's rate, take a
        tenth of its `weight_decay`; see `muon`.

    Returns:
      The optimizer, for the full parameter tree.

    Raises:
      ValueError: if an argument or a parameter is not allowed; the message names it.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> optimizer = curvax.racs(0.02, adam_learning_rate=1e-3)
      >>> state = optimizer.init(params)
      >>> updates, state = jax.jit(optimizer.update)(params, state, params)
      >>> params = optax.apply_updates(params, updates)

    References:
      Gong et al., `Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation
      <https://arxiv.org/abs/2502.07752>`_, Algorithm 1, Eq. 16, Proposition 3.
    """
    return assemble(
        scale_by_racs(
            b2=b2,
            scale=scale,
            gamma=gamma,
            iterations=iterations,
            bias_correction=bias_correction,
            limit=limit,
        ),
        learning_rate,
        matrices=as_rule(matrices, weight_dimension_numbers, output_layer="auto"),
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        weights=weights,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )

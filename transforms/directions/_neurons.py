r"""One step size per neuron: NorMuon's second moment (Li et al., arXiv:2510.05491, Algorithm 1).

$$v_j \leftarrow b_2 v_j + (1-b_2)\, \frac1m \sum_i O_{ij}^2, \qquad
D = \hat O\, \|O\| \,/\, \|\hat O\|, \quad \hat O_{ij} = O_{ij} / (\sqrt{v_j} + \epsilon)$$

for a direction $O$, such as Muon's, whose neurons, the columns of a matrix (its outputs), have
unequal lengths if it is tall; the paper's weights are transposed. The paper rescales matrices to a
root mean square of 0.2 instead, as `normalize_matrices(0.2)` does.

*Numerics.* float32 at least. A neuron gives 0 if its $\sqrt{v}$ is rounding noise beside the
largest of its matrix. *Cost*: two passes. *State*: one number per neuron.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._recording import Meaning, record
from .._side import side_of
from .._stacks import each_array
from .._validate import checked
from ..linalg._numerics import rescaled, significant


class NeuronState(NamedTuple):
    neurons: jax.Array  # v, (..., n), or (..., m) on the left side, float32 at least

    second_moments = ("neurons",)


@checked
def normalize_neurons(
    b2: jax.typing.ArrayLike = 0.95, eps: jax.typing.ArrayLike = 1e-8, *, side: str = "right"
) -> optax.GradientTransformation:
    """Divides each neuron by the root of its second moment; each matrix keeps its norm.

    Args:
      b2: decay rate of the second moments, which start at 0 without bias correction.
      eps: added to their roots.
      side: the side of the neurons: "right" (columns), "left" (rows), "smaller" or "larger".

    Returns:
      A transformation on batches of matrices `(..., m, n)`.

    Raises:
      ValueError: naming the argument that is outside its range, or a leaf that is not a matrix.

    Example:
      >>> import curvax, optax
      >>> normuon = optax.chain(curvax.scale_by_muon(), curvax.normalize_neurons())
    """

    def init(p: Any) -> NeuronState:
        shape = (*p.shape[:-2], side_of(side, p).order(p))
        record(Meaning(f"neurons: {side_of(side, p).value}"))
        return NeuronState(jnp.zeros(shape, np.promote_types(p.dtype, np.float32)))

    def update(x: Any, state: Any, params: Any = None):
        other, work = side_of(side, x).other_axis, x.astype(state.neurons.dtype)
        v = jnp.asarray(b2 * state.neurons + (1 - b2) * jnp.mean(work**2, axis=other))  # Alg. 1
        kept = significant(v)
        inverse = jnp.where(kept, 1 / (jnp.sqrt(jnp.where(kept, v, 1)) + eps), 0)
        # A damaged state must show, so that the guard starts it anew.
        inverse = jnp.where(jnp.isfinite(v).all(axis=-1, keepdims=True), inverse, jnp.nan)
        scaled = rescaled(work * jnp.expand_dims(inverse, other), work)
        return scaled.astype(x.dtype), NeuronState(v)

    return each_array("normalize_neurons", init, update, work=None)

"""What SOAP and Eigen-Adam are in special cases, and what they do not depend on."""

import jax
import numpy as np

import curvax
from tests.helpers import assert_close, program
from tests.shared.soap import one_eigen_adam, soap_gradients, soap_trajectory


def test_with_identity_bases_soap_is_adam_without_bias_correction():
    """Statistics of diagonal gradients with falling entries have them; and before any refresh."""
    gradients = soap_gradients((5, 8))
    never = curvax.every(10**6, first=False)
    found, _ = soap_trajectory(curvax.scale_by_soap(refresh=never), gradients, "float32")
    plain, _ = soap_trajectory(curvax.moment_ratio(), gradients, "float32")
    assert_close(found, plain, 4)


def test_soap_on_one_side_is_eigen_adam():
    gradient = jax.ShapeDtypeStruct((6, 9), "float32")
    one, other = curvax.scale_by_soap(side="left", refresh=3), curvax.scale_by_eigen_adam(refresh=3)
    state = jax.eval_shape(one.init, gradient)
    assert program(one.init, gradient) == program(other.init, gradient)
    assert program(one.update, gradient, state) == program(other.update, gradient, state)


def test_transposing_the_gradient_transposes_the_direction_of_soap():
    gradients = soap_gradients((5, 5))
    with jax.enable_x64(True):
        soap = curvax.scale_by_soap(refresh=3)
        one, _ = soap_trajectory(soap, gradients)
        other, _ = soap_trajectory(soap, [g.T for g in gradients])
        kappa = float(np.linalg.cond(gradients[0])) ** 4
        assert_close(np.swapaxes(other, 1, 2)[1:], one[1:], 64, condition=kappa)


def test_rotating_the_gradients_rotates_the_direction():
    gradients = soap_gradients((6, 9))
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    with jax.enable_x64(True):
        one, _ = soap_trajectory(one_eigen_adam(), gradients)
        other, _ = soap_trajectory(one_eigen_adam(), [turn @ g for g in gradients])
        kappa = float(np.linalg.cond(gradients[0])) ** 2
        assert_close(other, turn @ one, 64, condition=kappa)

"""What leads the field, from the library's parts, each as a full optimizer.

`curvax.recipes.normuon(0.02)` has the recipe's own arguments and those of `curvax.assemble`, but
`base` and `guard`; `curvax.recipes.normuon.direction(b1=0.9)` is the direction alone, for chains
and sums. `docs/combinations.md` shows of which parts they are, and has losses and learning rates
beside those of AdamW. All equal the algorithm of their source in float64, up to the `limit` of
SOAP's directions.

Sources of Muon's recipes have plain Nesterov momentum: `curvax.scale_by_muon(accumulate="sum")`,
where the default is Optax's, with bias correction. It changes the first steps alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax

from . import eigenbases, polar, policies, weights
from .optimizers import assemble, scale_by_muon, scale_by_soap
from .optimizers._assemble import others_or_adamw
from .transforms._keywords import check_keywords
from .transforms.directions._blend import TrustGate, blend
from .transforms.directions._dion import scale_by_dion
from .transforms.directions._moment_ratio import moment_ratio
from .transforms.directions._momentum import momentum
from .transforms.directions._normalize import normalize_matrices
from .transforms.directions._orthogonalize import orthogonalize, scale_by_shape
from .transforms.kronecker._eigenbasis import in_eigenbasis
from .transforms.kronecker._precondition import precondition
from .transforms.refresh._policy import as_policy, every
from .transforms.weights._weight_norms import scale_by_weight_norm

__all__ = [
    "cautious_muon",
    "dion",
    "eigenvalue_corrected_shampoo",
    "hyperball_muon",
    "kl_soap",
    "lars",
    "normuon",
    "one_sided_shampoo",
    "record_46",
    "rotated_soap",
    "soap_before_muon",
    "turbo_muon",
]

KEYWORDS = tuple(inspect.signature(assemble).parameters.values())[2:]
SHARED = tuple(x for x in KEYWORDS if x.name not in ("base", "guard"))
TURBO = polar.newton_schulz(4, coefficients="turbo_muon", norm="aol", dtype="bfloat16")
WARM = policies.diagonal_residual(1, 0.01)
SOAP: dict[str, Any] = {**dict.fromkeys(("b1", "b2", "b3"), 0.95), "eps": 0.0, "refresh": 10}
SOAP |= {"storage": None, "side": "both"}


def recipe(
    weights_of: Callable[[Any], weights.Weights] | None = None, /, **defaults: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a full optimizer of a function from keywords to a direction, its `direction`.

    Args:
      weights_of: from `weight_decay` to the `weights` of `assemble`, which is not an argument then.
      defaults: the recipe's arguments.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    hidden = () if weights_of is None else ("weights", "weight_decay_mask")
    keywords = [*parameters, *(x for x in SHARED if x.name not in hidden)]
    rate = inspect.Parameter("learning_rate", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature((rate, *keywords))

    def made(function: Callable[..., optax.GradientTransformation]) -> Any:
        def direction(**settings: Any) -> optax.GradientTransformation:
            return function(**{**defaults, **settings})

        @functools.wraps(function)
        def optimizer(*args: Any, **settings: Any) -> Any:
            check_keywords(function, signature.parameters, settings)
            arguments = signature.bind(*args, **settings).arguments
            learning_rate = arguments.pop("learning_rate")
            inner = direction(**{x: arguments.pop(x) for x in defaults if x in arguments})
            if weights_of is not None:
                decay = arguments.pop("weight_decay", 0.0)
                others = arguments.pop("others", None)
                adam_rate = arguments.pop("adam_learning_rate", None)
                arguments["others"] = others_or_adamw(others, adam_rate, learning_rate, decay, None)
                arguments["weights"] = weights_of(decay)
            return assemble(inner, learning_rate, **arguments)

        full: Any = optimizer
        direction.__signature__ = inspect.Signature(parameters)  # pyright: ignore
        full.__signature__ = signature
        full.__kwdefaults__ = {x.name: x.default for x in keywords}
        full.direction = direction
        return full

    return made


@recipe(**SOAP, initial=0.0, method="qr")
def kl_soap(**settings: Any) -> Any:
    """SOAP on the statistics of KL-Shampoo (Lin et al., arXiv:2509.03378)."""
    return scale_by_soap(statistics="kl", **settings)


@recipe(**SOAP, method="rotations")
def rotated_soap(**settings: Any) -> Any:
    """SOAP in bases that follow their statistics by products, on all platforms."""
    return scale_by_soap(**settings)


@recipe(**{**SOAP, "eps": 1e-8, "refresh": WARM}, method=None)
def eigenvalue_corrected_shampoo(*, method: Any, refresh: Any, **settings: Any) -> Any:
    """SOAP whose bases are renewed by warm QR where they no longer diagonalize.

    Eschenhagen et al., arXiv:2506.03595. Its learning rate is that of Shampoo grafted by Adam.
    """
    if method is None:
        method = "qr" if isinstance(refresh, policies.Every) else eigenbases.qr(10)
    return scale_by_soap(bias_correction=True, method=method, refresh=refresh, **settings)


@recipe(b1=0.95, b2=0.95, method="newton_schulz")
def normuon(**settings: Any) -> Any:
    """Muon with a second moment for each output (Li et al., arXiv:2510.05491)."""
    return optax.chain(scale_by_muon(**settings), scale_by_shape(0.2))


@recipe(b1=0.95, method=TURBO)
def turbo_muon(**settings: Any) -> Any:
    """Muon that starts from scaled rows, with four iterations in half precision.

    Boissin et al., arXiv:2512.04632.
    """
    return optax.chain(scale_by_muon(**settings), scale_by_shape(0.2))


@recipe(rank=64, b1=0.95, side="left", seed=0)
def dion(*, rank: int, **settings: Any) -> Any:
    """Orthonormal directions of low rank with error feedback (Ahn et al., arXiv:2504.05295)."""
    return optax.chain(scale_by_dion(rank, **settings), scale_by_shape())


@recipe(**SOAP, method="newton_schulz")
def soap_before_muon(*, method: Any, **settings: Any) -> Any:
    """A SOAP step, orthogonalized; `record_46` is the one of the record."""
    return optax.chain(scale_by_soap(**settings), orthogonalize(method), scale_by_shape(0.2))


@recipe(b1=0.95, b2=0.95, eps=0.0, refresh=10, storage=None, side="smaller")
def one_sided_shampoo(*, b1: Any, refresh: Any, **settings: Any) -> Any:
    """Shampoo with one factor, and the root of its pseudo-inverse (arXiv:2503.20762)."""
    policy = as_policy(refresh, offset=0, first=True)
    preconditioned = precondition(momentum(b1), root=2, refresh=policy, **settings)
    return optax.chain(preconditioned, normalize_matrices(0.2))


@recipe(b1=0.9, scale=1.0, min_rms=1e-3)
def lars(*, b1: Any, scale: Any, min_rms: Any) -> Any:
    """Momentum with the norm of the weights (Gong et al., arXiv:2502.07752, Eq. 34)."""
    return optax.chain(momentum(b1), scale_by_weight_norm(scale, min_rms=min_rms))


@recipe(lambda decay: weights.hyperball(), b1=0.95, method="newton_schulz")
def hyperball_muon(**settings: Any) -> Any:
    """Muon on spheres: weights keep their norms (Wen et al., arXiv:2606.16899).

    `weight_decay` is that of all other parameters. It is `curvax.muon(rate, weights="hyperball")`.
    """
    return scale_by_muon(**settings)


@recipe(lambda decay: weights.decay(decay, cautious=True), b1=0.95, method="newton_schulz")
def cautious_muon(**settings: Any) -> Any:
    """Muon with cautious decay of the matrices (Chen et al., arXiv:2510.12402)."""
    return optax.chain(scale_by_muon(**settings), scale_by_shape(0.2))


RECORD = weights.chain(
    weights.brake(0.5, pin=True),
    weights.floor(0.3825, unit="column"),  # of a kernel `(in, out)`: its outputs
    weights.decay(0.025, cautious=True, moved=True),
)
TWELVE = polar.newton_schulz(12, coefficients=(2.0, -1.5, 0.5), norm="gram", eps=0.0)


@recipe(lambda decay: RECORD, b1=0.95, b2=0.9, b3=0.9, gate=None, method=TWELVE)
def record_46(*, b1: Any, b2: Any, b3: Any, gate: TrustGate | None, method: Any) -> Any:
    r"""SOAP before Muon at every step, as in entry 46 of track 3 of modded-nanogpt.

    .. math::
      A = b_1 M + (1 - b_1) G, \qquad S = \mathrm{SOAP}(A)\, \|A\|_4 / \|\mathrm{SOAP}(A)\|_4,
      \qquad D = \mathrm{polar}(S)

    with the bases that the step before left, whose second moments are of :math:`A`. The first step
    has no bases: there :math:`S = A`. Matrices have a radial brake with a pin, a floor for each
    output and cautious decay behind the pin; `weight_decay` is that of all other parameters. With
    `gate`, as attention's output matrices have it, :math:`A` is blended in.

    The whole record has a schedule of `b1`, EMA-Nesterov and a tail average around it:
    `curvax.published.RUNS["record-46/track-3"]`.
    """
    nesterov = momentum(b1, nesterov=True)
    after_first: Any = lambda step: step > 0  # noqa: E731
    soap = optax.conditionally_transform(moment_ratio(0.0, b2), after_first)
    as_long = blend(optax.identity(), soap, (0.0, 1.0))
    if gate is None:
        directed = optax.chain(nesterov, as_long)
    else:
        directed = blend(optax.identity(), as_long, gate, shared=nesterov)
    in_bases = in_eigenbasis(directed, b3=b3, refresh=every(1), method="qr", lagged=True)
    return optax.chain(in_bases, orthogonalize(method), scale_by_shape())

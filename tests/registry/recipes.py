"""What leads the field as recipes: the chains of `docs/combinations.md`, as full optimizers.

A recipe is a function from keywords to a direction. The decorator has their defaults, and makes a
full optimizer with the arguments of `curvax.assemble` behind the recipe's own, as methods have.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax

import curvax
from curvax.optimizers._assemble import others_or_adamw
from curvax.transforms.directions._weight_decay import optional_decay
from curvax.transforms.refresh._policy import as_policy

REST = tuple(inspect.signature(curvax.assemble).parameters.values())[2:]
TURBO = curvax.polar.newton_schulz(4, coefficients="turbo_muon", norm="aol", dtype="bfloat16")
WARM = curvax.policies.diagonal_residual(1, 0.01)
SOAP: dict[str, Any] = {**dict.fromkeys(("b1", "b2", "b3"), 0.95), "eps": 0.0, "refresh": 10}
SOAP |= {"storage": None, "side": "both"}
SHARED = tuple(x for x in REST if x.name not in ("base", "guard"))


def recipe(
    *,
    behind: Callable[[Any], optax.GradientTransformation] | None = None,
    base: Callable[..., optax.GradientTransformation] | None = None,
    **defaults: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a full optimizer, whose attribute `direction` is the recipe.

    Args:
      behind: from a learning rate to what follows the direction, on the same matrices.
      base: from a learning rate, `weight_decay=` and `mask=` to what follows the matrices; plain
        descent by default.
      defaults: the recipe's arguments.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]

    def made(function: Callable[..., optax.GradientTransformation]) -> Any:
        def direction(**given: Any) -> optax.GradientTransformation:
            return function(**{**defaults, **given})

        @functools.wraps(function)
        def optimizer(learning_rate: Any, **settings: Any) -> Any:
            inner = direction(**{x: settings.pop(x) for x in defaults if x in settings})
            if base is not None:
                decay = settings.pop("weight_decay", 0.0)
                mask = settings.pop("weight_decay_mask", None)
                others = settings.pop("others", None), settings.pop("adam_learning_rate", None)
                settings["others"] = others_or_adamw(*others, learning_rate, decay, mask)
                settings["base"] = functools.partial(base, weight_decay=decay, mask=mask)
            if behind is not None:
                inner = optax.chain(inner, behind(learning_rate))
            return curvax.assemble(inner, learning_rate, **settings)

        rate = inspect.Parameter("learning_rate", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        direction.__signature__ = inspect.Signature(own)  # pyright: ignore
        optimizer.__signature__ = inspect.Signature((rate, *own, *SHARED))  # pyright: ignore
        optimizer.__kwdefaults__ = {x.name: x.default for x in (*own, *SHARED)}
        optimizer.direction = direction  # pyright: ignore
        return optimizer

    return made


@recipe(**SOAP, initial=0.0, method="qr")
def kl_soap(**given: Any) -> Any:
    """SOAP on the statistics of KL-Shampoo."""
    return curvax.scale_by_soap(statistics="kl", **given)


@recipe(**SOAP, method="rotations")
def rotated_soap(**given: Any) -> Any:
    """SOAP in bases that follow their statistics by products."""
    return curvax.scale_by_soap(**given)


@recipe(**{**SOAP, "eps": 1e-8, "refresh": WARM}, method=None)
def eigenvalue_corrected_shampoo(*, method: Any, refresh: Any, **given: Any) -> Any:
    """SOAP whose bases are renewed by warm QR where they no longer diagonalize."""
    if method is None:
        method = "qr" if isinstance(refresh, curvax.policies.Every) else curvax.eigenbases.qr(10)
    return curvax.scale_by_soap(bias_correction=True, method=method, refresh=refresh, **given)


@recipe(b1=0.95, b2=0.95, method="newton_schulz")
def normuon(**given: Any) -> Any:
    """Muon with a second moment for each output."""
    return optax.chain(curvax.scale_by_muon(**given), curvax.scale_by_shape(0.2))


@recipe(b1=0.95, method=TURBO)
def turbo_muon(**given: Any) -> Any:
    """Muon that starts from scaled rows, with four iterations in half precision."""
    return optax.chain(curvax.scale_by_muon(**given), curvax.scale_by_shape(0.2))


@recipe(rank=64, b1=0.95, side="left", seed=0)
def dion(*, rank: int, **given: Any) -> Any:
    """Orthonormal directions of low rank with error feedback."""
    return optax.chain(curvax.scale_by_dion(rank, **given), curvax.scale_by_shape())


@recipe(**SOAP, method="newton_schulz")
def soap_before_muon(*, method: Any, **given: Any) -> Any:
    """A SOAP step, orthogonalized."""
    soap, polar = curvax.scale_by_soap(**given), curvax.orthogonalize(method)
    return optax.chain(soap, polar, curvax.scale_by_shape(0.2))


@recipe(b1=0.95, b2=0.95, eps=0.0, refresh=10, storage=None, side="smaller")
def one_sided_shampoo(*, b1: Any, refresh: Any, **given: Any) -> Any:
    """Shampoo with one factor, and the root of its pseudo-inverse."""
    policy = as_policy(refresh, offset=0, first=True)
    preconditioned = curvax.precondition(curvax.momentum(b1), root=2, refresh=policy, **given)
    return optax.chain(preconditioned, curvax.normalize_matrices(0.2))


@recipe(b1=0.9, scale=1.0)
def lars(*, b1: Any, scale: Any) -> Any:
    """Momentum with the norm of the weights."""
    return optax.chain(curvax.momentum(b1), curvax.scale_by_weight_norm(scale))


def _on_spheres(rate: Any) -> Any:
    follow, keep = curvax.scale_by_weight_norm(), curvax.keep_weight_norm()
    return optax.chain(follow, optax.scale_by_learning_rate(rate), keep)


def _nothing(rate: Any, **decay: Any) -> Any:
    del rate, decay  # the norms stay
    return optax.identity()


def _cautious(rate: Any, *, weight_decay: Any, mask: Any) -> Any:
    decay = optional_decay(weight_decay, curvax.add_cautious_decay(weight_decay, mask))
    return optax.chain(decay, optax.scale_by_learning_rate(rate))


@recipe(behind=_on_spheres, base=_nothing, b1=0.95, method="newton_schulz")
def hyperball_muon(**given: Any) -> Any:
    """Muon on spheres: weights keep their norms."""
    return curvax.scale_by_muon(**given)


@recipe(base=_cautious, b1=0.95, method="newton_schulz")
def cautious_muon(**given: Any) -> Any:
    """Muon with cautious decay."""
    return optax.chain(curvax.scale_by_muon(**given), curvax.scale_by_shape(0.2))

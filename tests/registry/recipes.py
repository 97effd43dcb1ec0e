"""What leads the field as recipes: the chains of `docs/combinations.md`, as full optimizers.

A recipe is a function from keywords to a direction. The decorator makes a full optimizer of it,
with the arguments of `curvax.assemble` behind the recipe's own, as the library's methods have them.
"""

from __future__ import annotations

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
SHARED = tuple(x for x in REST if x.name not in ("base", "guard"))


def recipe(
    direction: Callable[..., optax.GradientTransformation] | None = None,
    *,
    behind: Callable[[Any], optax.GradientTransformation] | None = None,
    base: Callable[..., optax.GradientTransformation] | None = None,
) -> Any:
    """The full optimizer, whose attribute `direction` is the recipe.

    Args:
      direction: the recipe.
      behind: from a learning rate to what follows the direction, on the same matrices.
      base: from a learning rate, `weight_decay=` and `mask=` to what follows the matrices; plain
        descent by default.
    """
    if direction is None:
        return functools.partial(recipe, behind=behind, base=base)

    own = tuple(inspect.signature(direction).parameters.values())

    @functools.wraps(direction)
    def optimizer(learning_rate: Any, **settings: Any) -> Any:
        given = {x.name: settings.pop(x.name) for x in own if x.name in settings}
        if base is not None:
            decay, mask = settings.pop("weight_decay", 0.0), settings.pop("weight_decay_mask", None)
            others = settings.pop("others", None), settings.pop("adam_learning_rate", None)
            settings["others"] = others_or_adamw(*others, learning_rate, decay, mask)
            settings["base"] = functools.partial(base, weight_decay=decay, mask=mask)
        made = direction(**given)
        if behind is not None:
            made = optax.chain(made, behind(learning_rate))
        return curvax.assemble(made, learning_rate, **settings)

    rate = inspect.Parameter("learning_rate", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    optimizer.__signature__ = inspect.Signature((rate, *own, *SHARED))  # pyright: ignore
    optimizer.__kwdefaults__ = {x.name: x.default for x in (*own, *SHARED)}
    optimizer.direction = direction  # pyright: ignore
    return optimizer


@recipe
def kl_soap(
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    b3: Any = 0.95,
    initial: Any = 0.0,
    eps: Any = 0.0,
    method: str = "qr",
    refresh: Any = 10,
    storage: Any = None,
    side: str = "both",
) -> Any:
    """SOAP on the statistics of KL-Shampoo."""
    return curvax.scale_by_soap(
        b1=b1,
        b2=b2,
        b3=b3,
        statistics="kl",
        initial=initial,
        eps=eps,
        method=method,
        refresh=refresh,
        storage=storage,
        side=side,
    )


@recipe
def tracked_soap(
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    b3: Any = 0.95,
    eps: Any = 0.0,
    method: str = "tracked",
    refresh: Any = 10,
    storage: Any = None,
    side: str = "both",
) -> Any:
    """SOAP in bases that follow their statistics by products."""
    return curvax.scale_by_soap(
        b1=b1, b2=b2, b3=b3, eps=eps, method=method, refresh=refresh, storage=storage, side=side
    )


@recipe
def eigenvalue_corrected_shampoo(
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    b3: Any = 0.95,
    eps: Any = 1e-8,
    method: Any = None,
    refresh: Any = WARM,
    storage: Any = None,
    side: str = "both",
) -> Any:
    """SOAP whose bases are renewed by warm QR where they no longer diagonalize."""
    if method is None:
        method = "qr" if isinstance(refresh, curvax.policies.Every) else curvax.eigenbases.qr(10)
    return curvax.scale_by_soap(
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        bias_correction=True,
        method=method,
        refresh=refresh,
        storage=storage,
        side=side,
    )


@recipe
def normuon(*, b1: Any = 0.95, b2: Any = 0.95, method: Any = "newton_schulz") -> Any:
    """Muon with a second moment for each output."""
    direction = curvax.scale_by_muon(b1=b1, b2=b2, method=method)
    return optax.chain(direction, curvax.scale_by_shape(0.2))


@recipe
def turbo_muon(*, b1: Any = 0.95, method: Any = TURBO) -> Any:
    """Muon that starts from scaled rows, with four iterations in half precision."""
    return optax.chain(
        curvax.scale_by_muon(b1=b1, method=method),
        curvax.scale_by_shape(0.2),
    )


@recipe
def dion(*, rank: int = 64, b1: Any = 0.95, side: str = "left", seed: int = 0) -> Any:
    """Orthonormal directions of low rank with error feedback."""
    direction = curvax.scale_by_dion(rank, b1=b1, side=side, seed=seed)
    return optax.chain(direction, curvax.scale_by_shape())


@recipe
def soap_before_muon(
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    b3: Any = 0.95,
    eps: Any = 0.0,
    method: Any = "newton_schulz",
    refresh: Any = 10,
    storage: Any = None,
    side: str = "both",
) -> Any:
    """A SOAP step, orthogonalized."""
    return optax.chain(
        curvax.scale_by_soap(
            b1=b1, b2=b2, b3=b3, eps=eps, refresh=refresh, storage=storage, side=side
        ),
        curvax.orthogonalize(method),
        curvax.scale_by_shape(0.2),
    )


@recipe
def one_sided_shampoo(
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    eps: Any = 0.0,
    refresh: Any = 10,
    storage: Any = None,
    side: str = "smaller",
) -> Any:
    """Shampoo with one factor, and the root of its pseudo-inverse."""
    return optax.chain(
        curvax.precondition(
            curvax.momentum(b1),
            b2=b2,
            root=2,
            eps=eps,
            refresh=as_policy(refresh, offset=0, first=True),
            storage=storage,
            side=side,
        ),
        curvax.normalize_matrices(0.2),
    )


@recipe
def lars(*, b1: Any = 0.9, scale: Any = 1.0) -> Any:
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


@recipe(behind=_on_spheres, base=_nothing)
def hyperball_muon(*, b1: Any = 0.95, method: Any = "newton_schulz") -> Any:
    """Muon on spheres: weights keep their norms."""
    return curvax.scale_by_muon(b1=b1, method=method)


@recipe(base=_cautious)
def cautious_muon(*, b1: Any = 0.95, method: Any = "newton_schulz") -> Any:
    """Muon with cautious decay."""
    direction = curvax.scale_by_muon(b1=b1, method=method)
    return optax.chain(direction, curvax.scale_by_shape(0.2))

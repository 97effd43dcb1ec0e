"""What to give in place of keywords that other libraries have."""

import functools
import inspect
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_OF_POLAR = ("muon", "osgdm", "sumo", "swan", "orthogonalize")  # whose `method` is a polar factor's
_B1 = ("b1", "b1=, its decay rate of the momentum")
_B2 = ("b2", "b2=, its decay rate of the second moment or the statistics")
_METHOD = ("method", "method=")
_STEPS = ("method", "method=curvax.polar.newton_schulz(steps)")
_REFRESH = ("refresh", "refresh=, a period or a policy of curvax.policies")
_FIELD = ("matrices", "matrices=curvax.MatrixRule({}=...)")
_BLOCKS = ("matrices", "matrices=curvax.MatrixRule(block_size=...)")
_BLOCKS_OF_ALL = ("", "curvax.on_matrices(direction, curvax.MatrixRule(block_size=...))")
_OTHERS = ("others", "others=optax.adamw(1e-3, ...), the optimizer of all other parameters")
_RATE = ("learning_rate", "the learning rate as the first argument")

HINTS: dict[str, Sequence[tuple[str, str]]] = {
    keyword: hints
    for keywords, *hints in (
        ("betas", ("b1 b2", "b1= and b2="), _B1, _B2),
        ("beta1 beta_1 momentum mu beta", _B1),
        ("beta2 beta_2", _B2),
        ("beta3 shampoo_beta", ("b3", "b3="), _B2),
        ("epsilon", ("eps", "eps=")),
        ("lr step_size", _RATE),
        ("solver algorithm preconditioner", _METHOD),
        ("ns_steps ns_coeffs ns_coefficients", _STEPS),
        ("block_size", _BLOCKS, _BLOCKS_OF_ALL),
        ("storage", ("", "curvax.quantize_state(optimizer), which stores moments in few bits")),
        ("head_wise output_layer family guess stack", _FIELD),
        ("max_precond_dim max_preconditioner_dim", ("max_order", "max_order="), _BLOCKS),
        ("precondition_frequency update_proj_gap update_freq update_interval", _REFRESH),
        ("mask wd_mask", ("weight_decay_mask", "weight_decay_mask=")),
        ("wd decay", ("weight_decay", "weight_decay=")),
        ("mu_dtype momentum_dtype", ("dtype", "dtype=")),
        ("adam_lr adamw_lr", ("adam_learning_rate", "adam_learning_rate=")),
        ("adam_b1 adam_b2 adam_betas adamw_betas adam_eps_root adam_weight_decay", _OTHERS),
        (
            "muon_weight_dimension_numbers",
            ("weight_dimension_numbers", "weight_dimension_numbers="),
        ),
    )
    for keyword in keywords.split()
}
"""By keyword: arguments of ours, and what to write. The first that the method has counts."""


def check_keywords(made: Any, known: Collection[str], keywords: Iterable[str]) -> None:
    """Says what to give in place of the first keyword of `HINTS` that a function does not have."""
    name = getattr(made, "__name__", type(made).__name__)
    is_polar = name.removeprefix("scale_by_") in _OF_POLAR
    for keyword in keywords:
        for argument, hint in () if keyword in known else HINTS.get(keyword, ()):
            if {*argument.split()} <= {*known} and (hint != _STEPS[1] or is_polar):
                raise TypeError(
                    f"{name}() got an unexpected keyword argument {keyword!r}; give "
                    f"{hint.format(keyword)}."
                )


def name_unknown_keywords(module: str, names: Iterable[str]) -> None:
    """Lets the functions of a package say what to give in place of a keyword of `HINTS`."""
    # Signatures stay as they are, for type checkers and for `inspect.signature`.
    package = sys.modules[module]
    for name in names:
        make = getattr(package, name)
        told = _telling(make)
        for home in (package, sys.modules[make.__module__]):  # one object, as `pickle` needs it
            setattr(home, name, told)


def _telling(make: Any) -> Any:
    known = inspect.signature(make).parameters.keys()

    @functools.wraps(make)
    def told(*args: Any, **kwargs: Any) -> Any:
        check_keywords(make, known, kwargs)
        return make(*args, **kwargs)

    same: Any = told
    same.__kwdefaults__ = make.__kwdefaults__
    return same

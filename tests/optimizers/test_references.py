"""Methods and chains against NumPy float64 transcriptions of the papers.

Cases are those of `tests/shared/transcriptions.py`. Gradients of `tests/shared/soap.py` make bases
unique; noise off the diagonal at step 1, by which SOAP divides in its first basis, is left out of
account (`start`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, at, scanned, weights_of_steps
from tests.reference.cautious import cautious_weight_decay, hyperball
from tests.reference.dion import dion
from tests.reference.eigenvalue_corrected import eigenvalue_corrected
from tests.reference.kl_shampoo import kl_shampoo, kl_shampoo_eigenbasis, kl_soap
from tests.reference.lars import lars
from tests.reference.normuon import normuon
from tests.reference.one_sided_shampoo import one_sided_shampoo
from tests.reference.osgdm import osgdm
from tests.reference.polar_starts import TURBO_MUON, muon_from
from tests.reference.qk_clip import largest_logits, muon_clip
from tests.reference.rotated_foam import rotated_foam
from tests.reference.rotated_roots import rotated_roots
from tests.reference.rotations import rotated
from tests.reference.soap import adadiag, eigen_adam, soap
from tests.reference.soap_muon import soap_muon
from tests.reference.swan import swan
from tests.registry import METHODS, Row
from tests.shared.factors import statistic_of
from tests.shared.soap import STEPS, growing_gradients, soap_gradients
from tests.shared.transcriptions import Case, assert_follows, by_period, of_smaller

INF = float("inf")
NEWTON_SCHULZ = 3.4445**5  # five iterations multiply small singular values by 3.4445
SHAPES = dict(
    cells([("wide", (6, 15)), ("square", (5, 5)), ("odd", (7, 11)), ("tall", (9, 6))], of=3)
)
GRADIENTS = {name: soap_gradients(shape) for name, shape in SHAPES.items()}
GROWING = {name: growing_gradients(shape) for name, shape in SHAPES.items()}
SQUARE, WIDE = {"square": soap_gradients((5, 5))}, {"wide": soap_gradients((5, 8))}


def after_diagonal(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """With a first diagonal gradient, whose eigenbasis and that of the initial factors agree.

    Papers and official code of KL-Shampoo do not say what eigenvalues are in a first eigenbasis.
    """
    first = np.zeros_like(gradients[0])
    np.fill_diagonal(first, np.linspace(3, 2, min(first.shape)))
    return [first, *gradients[1:]]


AFTER_DIAGONAL = {name: after_diagonal(g) for name, g in GRADIENTS.items()}


def of_first(power: int) -> Callable[..., float]:
    """A power of the condition of the first gradient, as its statistics and bases have it."""
    return lambda gradients, states: float(np.linalg.cond(gradients[0])) ** power


def of_all(gradients: list[np.ndarray], states: Any) -> float:
    return max(float(np.linalg.cond(g)) for g in gradients) ** 2


def of_blocks(gradients: list[np.ndarray], states: Any) -> float:
    """The largest condition number of a root's argument."""
    blocks = [s[name] for s in states for name in ("H_L", "H_R") if s[name] is not None]
    return max(float(np.linalg.cond(block)) for block in blocks)


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    with jax.enable_x64(True):
        yield


case = functools.partial(Case, factor=64.0)


def in_coordinates(states: Any, name: str) -> Any:
    """The state with statistics in the gradient's coordinates, as papers have them."""
    state = states[name]
    sides = {"left": state.left, "right": state.right}
    return state._replace(
        **{side: f and f._replace(statistic=statistic_of(f)) for side, f in sides.items()}
    )


# Muon and what is made of it


def muon(**settings: Any) -> Any:
    return curvax.scale_by_muon(method=curvax.polar.newton_schulz(**settings))


def scaled(length: Callable[[int, int], float], theirs: Any) -> Any:
    """The transcription at a length for its shape, which recipes have."""

    def run(*given: Any, **settings: Any) -> Any:
        directions, states = theirs(*given, **settings)
        return [length(*d.shape) * d for d in directions], states

    return run


as_long_as_adamw = functools.partial(scaled, lambda m, n: 0.2 * np.sqrt(max(m, n)))


EXPRESS = curvax.NEWTON_SCHULZ_COEFFICIENTS["polar_express"][:5]
PRINTED_NORMUON = optax.chain(
    curvax.momentum(0.95),
    curvax.orthogonalize(),
    curvax.normalize_neurons(0.95, 1e-10, side="left"),
    curvax.normalize_matrices(0.2),
)
AS_OURS = {"b2": 0.9, "eps": 1e-8, "scale": "norm", "neurons": "columns"}
AS_OURS |= {"nesterov": True, "bias_correction": True}
MUON: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "NorMuon as printed": (PRINTED_NORMUON, normuon, {}),
    "muon with b2": (
        curvax.recipes.normuon.direction(b2=0.9),
        as_long_as_adamw(normuon),
        AS_OURS,
    ),
    "Turbo-Muon": (
        curvax.recipes.turbo_muon.direction(
            method=curvax.polar.newton_schulz(4, norm="aol", coefficients="turbo_muon")
        ),
        as_long_as_adamw(muon_from),
        {"start": "aol", "coefficients": TURBO_MUON},
    ),
    "from Schatten 4": (muon(norm="gram"), muon_from, {"start": "schatten"}),
    "on the Gram matrix": (
        muon(coefficients="polar_express"),
        muon_from,
        {"gram": True, "coefficients": EXPRESS},
    ),
}
PRINTED_SWAN = curvax.polar.newton_schulz(coefficients=(1.5, -0.5, 0.0), norm="gram", eps=0.0)
NORMAL = {
    f"{m}x{n}": list(np.random.default_rng((m, n)).standard_normal((4, m, n)))
    for m, n in ((5, 8), (8, 5), (6, 6), (7, 1))
}
CASES: dict[str, Case] = {
    **{
        name: Case(
            ours,
            functools.partial(theirs, **settings),
            GRADIENTS,
            NEWTON_SCHULZ,
            # Our Newton-Schulz adds an ε of 1e-8 to the norm; the printed starts have none.
            eps=1e-8 if name not in ("NorMuon as printed", "muon with b2") else None,
        )
        for name, (ours, theirs, settings) in MUON.items()
    },
    "SWAN": Case(curvax.scale_by_swan(method="svd"), swan, NORMAL, factor=256.0),
    "SWAN by Newton-Schulz": Case(
        curvax.scale_by_swan(method=PRINTED_SWAN),
        functools.partial(swan, method="newton_schulz"),
        NORMAL,
        factor=256.0,
    ),
}

# SOAP and what is made of it


CORRECTED: dict[str, Any] = {"eps": 1e-8, "bias_correction": True}
RATES: dict[str, Any] = {"b1": 0.9, "b2": 0.99, "b3": 0.8}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    ", corrected": (CORRECTED, CORRECTED),
    ", first step skipped": ({"skip_first": True}, {"skip_first": True}),
    ", by QR": ({"method": "qr"}, {"refresh": "qr", "carry_v": "permute"}),
    ", other decay rates": (RATES, RATES),
}
PERIODS = (1, 4)
BOTH: Any = {"left.statistic": ("L", 1.0), "right.statistic": ("R", 1.0)}
CASES |= {
    f"SOAP on one side{name}": case(
        by_period(curvax.scale_by_soap, side="smaller", **ours),
        lambda g, k, theirs=theirs: soap(g, K=k, side=of_smaller(g), **theirs),
        GRADIENTS,
        of_first(2),
        {"inner.nu": ("v", None)},
        PERIODS,
    )
    for name, (ours, theirs) in VARIANTS.items()
}
CASES["SOAP, corrected"] = case(
    by_period(curvax.scale_by_soap, **CORRECTED),
    lambda g, k: soap(g, K=k, side="both", **CORRECTED),
    SQUARE,
    of_first(4),
    {**BOTH, "inner.nu": ("v", None)},
    PERIODS,
    start=1,
    state_of=in_coordinates,
)
CASES |= {
    name: Case(
        by_period(curvax.scale_by_eigen_adam, b3=b3),
        lambda g, k, theirs=theirs: theirs(g, K=k),
        {"wide": soap_gradients((6, 9))},
        of_all,
        periods=(4,),
        factor=256.0,
    )
    for name, b3, theirs in (("Eigen-Adam", 0.95, eigen_adam), ("AdaDiag", 0.0, adadiag))
}


WITHOUT_EPS = curvax.polar.newton_schulz(eps=0.0)  # in front of it the transcription has a norm
AS_RECORDED = optax.chain(curvax.momentum(0.95, nesterov=True), curvax.moment_ratio(0.0, 0.9))
DOCUMENTED = {"mu": 0.9, "b2": 0.95, "nesterov": False, "second_moment": "gradient"}
CASES["SOAP before Muon"] = case(
    curvax.recipes.soap_before_muon.direction(
        b1=0.9, b2=0.95, b3=0.9, refresh=4, side="smaller", method=WITHOUT_EPS
    ),
    functools.partial(
        as_long_as_adamw(soap_muon),
        **{"K": 4, "side": "smaller", "ns_eps": 0.0, "refresh": "eigh", **DOCUMENTED},
    ),
    GRADIENTS,
    1e3 * NEWTON_SCHULZ,
)
CASES["SOAP before Muon as in the record"] = case(
    optax.chain(
        curvax.in_eigenbasis(AS_RECORDED, b3=0.9, refresh=curvax.every(4), method="qr"),
        curvax.orthogonalize(WITHOUT_EPS),
    ),
    functools.partial(soap_muon, K=4, side="both", ns_eps=0.0, mu=0.95, b2=0.9),
    GROWING,
    1e3 * NEWTON_SCHULZ,
)

# Rotated bases and roots

CASES |= {
    f"rotated SOAP, {side}": case(
        by_period(curvax.scale_by_soap, method="rotations", limit=INF, side=side),
        lambda g, k, side=side: rotated(g, period=k, side=side),
        own,
        of_first(4),
        {"left.basis": ("U_L", None), "left.statistic": ("H_L", None)},
        (1, 3),
        start=1,
    )
    for side, own in {"left": WIDE, "both": SQUARE}.items()
}
RELATIVE: dict[str, Any] = {"eps": 1e-6, "initial": 1e-6}
CASES |= {
    "rotated KL-Shampoo": case(
        by_period(
            functools.partial(curvax.in_eigenbasis, curvax.momentum(0.95)),
            statistics="kl",
            divide=True,
            method="rotations",
        ),
        lambda g, k: rotated(g, period=k, kl=True),
        SQUARE,
        of_first(4),
        periods=(2,),
    ),
    "rotated square roots": case(
        curvax.precondition(
            curvax.momentum(0.9), refresh=curvax.every(1), side="left", root=2, method="rotations"
        ),
        functools.partial(rotated_roots, b1=0.9, sides="left", root=2),
        WIDE,
        of_blocks,
    ),
    "rotated fourth roots": case(
        curvax.precondition(
            refresh=curvax.every(3, offset=1),
            method="rotations",
            damping_mode="relative",
            **RELATIVE,
        ),
        functools.partial(rotated_roots, root=4, period=3, damping="relative", **RELATIVE),
        SQUARE,
        of_blocks,
    ),
}
# Both sides refresh two or three times after the first, and damp at 10 to 15 steps.
FOAM: dict[str, Any] = {"max_damping": 0.1, "b2": 0.9}
FOAM |= {"check_every": 2, "threshold": 0.2, "root": 4}
CASES["rotated FOAM, grafted"] = case(
    curvax.scale_by_foam(method="rotations", eps=1e-2, graft=curvax.grafts.adam(0.8), **FOAM),
    functools.partial(rotated_foam, base_damping=1e-2, graft="adam", b1=0.8, **FOAM),
    SQUARE,
    1e5,
    {"left.damping": ("eps_L", None), "right.statistic": ("H_R", None)},
    state_of=lambda states, name: states.direction[name],
)

# Whitened statistics, and one factor


def from_length(reference: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Factors start at the root of the first gradient's mean square, if the settings do not say."""

    def theirs(gradients: list[np.ndarray]) -> Any:
        start = settings.get("initial") or float(np.sqrt(np.mean(gradients[0] ** 2)))
        own = {} if reference is kl_shampoo else {"initial_factor": start}
        return reference(gradients, **{**settings, "initial": start, **own})

    return theirs


def whitened(momentum: Any = None, **settings: Any) -> Any:
    given = {"root": 2, "b2": 0.95, "statistics": "kl", "eps": 0.0, **settings}
    return curvax.precondition(momentum, **given)


STATISTICS: Any = {"left.statistic": ("L", 1e3), "right.statistic": ("R", 1e3)}
OF_KL = {**STATISTICS, "left.spectrum": ("d_L", 1e4)}
KL: dict[str, Any] = {"b": 0.95, "K": 4}
QR: dict[str, Any] = {**KL, "refresh": "qr", "sort": True, "at_refresh": "permute"}
EIGH: dict[str, Any] = {**KL, "refresh": "eigh", "at_refresh": "keep", "initial": 0.1}
SINGULAR = {
    **GRADIENTS,
    "singular": [g * (np.arange(6) > 0)[:, None] for g in soap_gradients((6, 15))],
}
by_roots = functools.partial(
    case, gradients=AFTER_DIAGONAL, condition=1e3, states=STATISTICS, state_of=in_coordinates
)
in_bases = functools.partial(by_roots, condition=1e4, states=OF_KL)
CASES |= {
    "KL-Shampoo by stale roots": by_roots(
        whitened(curvax.momentum(0.9), refresh=curvax.every(4)),
        from_length(kl_shampoo, K=4, b1=0.9),
    ),
    "KL-Shampoo by roots from another start": by_roots(
        # The first inverse, of the initial factors, has no ε here; the paper prints none.
        whitened(refresh=curvax.every(4), initial=0.1, eps=1e-3),
        from_length(kl_shampoo, K=4, initial=0.1, initial_root=0.1**-0.5, eps=1e-3),
    ),
    "KL-Shampoo": in_bases(
        curvax.scale_by_kl_shampoo(b1=0.9, b2=0.95, refresh=4, method="qr", limit=INF),
        from_length(kl_shampoo_eigenbasis, **QR, b1=0.9),
    ),
    "KL-Shampoo by eigh": in_bases(
        curvax.scale_by_kl_shampoo(
            b1=0.0, b2=0.95, refresh=4, initial=0.1, method="eigh", limit=INF
        ),
        from_length(kl_shampoo_eigenbasis, **EIGH),
    ),
    "KL-SOAP": in_bases(
        curvax.scale_by_soap(refresh=4, statistics="kl", method="qr", limit=INF),
        from_length(kl_soap, **QR),
    ),
    "one-sided Shampoo": case(
        curvax.recipes.one_sided_shampoo.direction(),
        one_sided_shampoo,
        SINGULAR,  # also where the factor has no full rank
        1e3,
    ),
}


@pytest.mark.parametrize("row", [row for row in METHODS if row.reference], ids=str)
def test_methods_follow_the_reference_of_their_row(row: Row) -> None:
    assert row.reference is not None
    assert_follows(case(row.make_direction(), row.reference, GRADIENTS, row.growth))


@pytest.mark.parametrize("name", cells(CASES, of=5))
def test_directions_follow_the_transcription(name: str) -> None:
    assert_follows(CASES[name])


# With a first state, weights or a learning rate


TOGETHER = {name: np.stack(gradients) for name, gradients in GRADIENTS.items()}


@pytest.mark.parametrize("side", ["left", "right"])
def test_dion_follows_the_transcription(side: str) -> None:
    direction = curvax.recipes.dion.direction(rank=3, b1=0.9, side=side)
    states, _ = jax.jit(direction.init)(at(TOGETHER, 0))
    first = {shape: states[name].factor for name, shape in SHAPES.items()}
    of_shape = scaled(lambda m, n: np.sqrt(max(1, n / m)), dion)

    def theirs(gradients: list[np.ndarray]) -> Any:
        return of_shape(gradients, first[gradients[0].shape], mu=0.9, transposed=side == "right")

    ours = case(direction, theirs, GRADIENTS, 1e3, {"mu": ("M", None)})
    assert_follows(ours._replace(state_of=lambda states, name: states[0][name]))


def test_lars_follows_the_transcription() -> None:
    direction = curvax.recipes.lars.direction(b1=0.9, scale=0.3)
    weights = {name: gradients[0] + 1 for name, gradients in GRADIENTS.items()}
    found, _ = scanned(direction)(TOGETHER, params=weights)
    for name in SHAPES:
        expected, _ = lars(GRADIENTS[name], weights[name], phi=lambda z: 0.3 * z)
        assert_close(found[name], np.stack(expected), 64)


ON_WEIGHTS = {
    "cautious decay": (
        optax.chain(curvax.add_cautious_decay(0.5), optax.scale_by_learning_rate(0.1)),
        functools.partial(cautious_weight_decay, learning_rate=0.1, weight_decay=0.5),
    ),
    "hyperball": (
        optax.chain(
            curvax.scale_by_weight_norm(),
            optax.scale_by_learning_rate(0.1),
            curvax.keep_weight_norm(),
        ),
        functools.partial(hyperball, learning_rate=0.1),
    ),
}


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_weights_follow_the_transcription(name: str) -> None:
    optimizer, theirs = ON_WEIGHTS[name]
    weights = {name: gradients[-1] for name, gradients in GRADIENTS.items()}
    found = weights_of_steps(optimizer, weights, TOGETHER)
    for name, own in GRADIENTS.items():
        _, states = theirs(own, weights[name])
        assert_close(list(found[name]), [state["W"] for state in states], 64)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_osgdm_follows_the_transcription_under_a_schedule(decay: float) -> None:
    """Every direction keeps its own learning rate; weight decay stays out of the momentum."""
    rates, start = [0.1 / (1 + t) for t in range(STEPS)], np.ones((5, 8))
    moves, _ = osgdm(WIDE["wide"], rates, gamma=0.9)
    optimizer = curvax.osgdm(lambda t: 0.1 / (1 + t), b1=0.9, weight_decay=decay)
    gradients = {"kernel": np.stack(WIDE["wide"])}
    found = weights_of_steps(optimizer, {"kernel": start}, gradients)["kernel"]
    for before, after, rate, move in zip([start, *found], found, rates, moves, strict=False):
        assert_close(after - before, -move - rate * decay * before, 256)


# MuonClip

WIDTH, HEADS, TIME, TAU = 6, 3, 4, 1.5
PLAIN = {"qc": (WIDTH, HEADS, 4), "kc": (WIDTH, HEADS, 4)}
LATENT = {**PLAIN, "qr": (WIDTH, HEADS, 2), "kr": (WIDTH, 2)}
POWERS = {"qr": 1.0, "*": 0.5}


@pytest.mark.parametrize(("shapes", "power"), [(PLAIN, 0.5), (LATENT, POWERS)], ids=["MHA", "MLA"])
def test_muon_with_clipped_logits_is_muon_clip(shapes: Any, power: Any) -> None:
    generator = np.random.default_rng(0)

    def drawn(number: int) -> list[dict[str, np.ndarray]]:
        return [{k: generator.standard_normal(s) for k, s in shapes.items()} for _ in range(number)]

    (first,), gradients = drawn(1), drawn(STEPS)
    batches = [generator.standard_normal((2, TIME, WIDTH)) / 2 for _ in range(STEPS)]
    axes = {name: curvax.MatrixAxes(0, tuple(range(1, len(s)))) for name, s in shapes.items()}
    settings: dict[str, Any] = {"nesterov": False, "accumulate": "sum", "consistent_rms": 0.2}
    settings |= {"weight_decay": 0.1, "matrices": "all", "weight_dimension_numbers": axes}
    optimizer = optax.chain(curvax.muon(0.1, **settings), curvax.clip_logits(TAU, power=power))

    @jax.jit
    def step(weights: Any, state: Any, g: Any, largest: Any) -> Any:
        told = {name: largest[:, None] for name in shapes if name != "kr"}
        updates, state = optimizer.update(g, state, weights, max_logits=told)
        return optax.apply_updates(weights, updates), state

    weights, state, found = first, optimizer.init(first), []
    for g, x in zip(gradients, batches, strict=True):
        weights, state = step(weights, state, g, largest_logits(jax.device_get(weights), x))
        found.append(jax.device_get(weights))
    expected, logits = muon_clip(gradients, batches, first, learning_rate=0.1, tau=TAU)
    clipped = np.array(logits) > TAU
    assert 0.1 < clipped.mean() < 0.9
    # A difference in weights moves the logits, and these the next weights.
    assert_close(found, expected, 64, condition=NEWTON_SCHULZ)


# Eigenvalue-corrected Shampoo


def graded() -> list[np.ndarray]:
    """Square gradients whose statistics keep the order of their eigenvalues.

    Ours sorts columns before each QR, as SOAP does, and the paper's code after the last one.
    """
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    scale, noise = 2.0 ** -np.arange(5), np.random.default_rng(1).standard_normal((STEPS, 5, 5))
    return [turn @ (scale[:, None] * (np.eye(5) + 0.05 * x)) @ turn for x in noise]


def over_gap(factor: np.ndarray) -> float:
    """`λ_max / gap`, by which rounding turns a basis; null spaces have unit vectors here."""
    values = np.linalg.eigvalsh(factor) / np.linalg.norm(factor, 2)
    gap = np.diff(values[values > 1e-12]).min(initial=1)
    assert gap > 1e-5
    return 1 / gap


TOLERANCE = 0.005


@pytest.mark.parametrize(("method", "kind"), cells(["eigh", "qr"], ["graded", "growing"], of=4))
def test_soap_with_warm_qr_is_eigenvalue_corrected_shampoo(method: str, kind: str) -> None:
    """Bases are renewed where the criterion fails, by as many steps as it takes: in some steps and
    not in others. From dense gradients a renewal takes several steps of QR."""
    gradients = {"graded": graded()} if kind == "graded" else GROWING
    settings: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "b3": 0.9, "eps": 1e-8}
    ours = curvax.scale_by_soap(
        **settings,
        bias_correction=True,
        method=curvax.eigenbases.qr(100) if method == "qr" else method,
        refresh=curvax.policies.diagonal_residual(1, TOLERANCE),
        limit=INF,
    )
    found, states = scanned(ours)({name: np.stack(own) for name, own in gradients.items()})
    for name, own in gradients.items():
        expected, kept = eigenvalue_corrected(own, tolerance=TOLERANCE, method=method, **settings)
        for side in ("left",) if name == "graded" else ("left", "right"):
            renewed = [state[f"new_{side[0].upper()}"] for state in kept]
            assert 3 < sum(renewed) < len(renewed), (name, side)
            counts = getattr(states[name], side).refreshes
            assert np.diff([0, *counts]).tolist() == [int(x) for x in renewed], (name, side)
        if name == "graded":
            assert method == "eigh" or max(state["iterations_L"] for state in kept) > 1
        # In the first basis, which diagonalizes the first gradient, noise is divided by noise.
        for t in range(name == "graded", len(own)):
            turned = 1e3 + max(over_gap(kept[t][side]) for side in "LR")
            condition = 1e5 if name == "graded" else turned
            assert_close(found[name][t], expected[t], 64, condition=condition)

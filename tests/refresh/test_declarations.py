"""What a policy declares that it examines decides which transformations take it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import policies, subspaces
from tests.helpers import run

EPS, ROOT = 0.25, 2
TAKEN: dict[str, tuple[str | None, ...]] = {
    "precondition": (None, "eigenpairs", "damping"),
    "in_eigenbasis": (None, "eigenpairs"),
    "in_subspace": (None, "projection"),
}
POLICIES = {
    None: curvax.every(2),
    "eigenpairs": policies.diagonal_residual(2),
    "damping": policies.foam(2, max_damping=1.0),
    "projection": policies.below_norm(1.0),
}


def made(transformation: str, refresh: Any) -> optax.GradientTransformation:
    if transformation == "precondition":
        return curvax.precondition(refresh=refresh, side="left", root=ROOT, eps=EPS, b2=0.5)
    if transformation == "in_eigenbasis":
        return curvax.in_eigenbasis(optax.identity(), refresh=refresh, side="left", b3=0.5)
    return curvax.in_subspace(optax.identity(), 2, basis=subspaces.svd(), refresh=refresh)


@dataclasses.dataclass(frozen=True)
class Written(policies.RefreshPolicy):
    """A policy of a user that declares anything, with what that needs or without."""

    examines: Any
    schedule: policies.Every = dataclasses.field(default_factory=lambda: curvax.every(2))


class WithExamine(Written):
    def examine(self, check: Any) -> policies.Verdict:
        return policies.Verdict(check.first)


class WithDamping(WithExamine):
    max_damping = 1.0


@pytest.mark.parametrize("transformation", TAKEN)
@pytest.mark.parametrize("examines", POLICIES)
def test_policies_are_taken_by_their_declaration(transformation: str, examines: str | None) -> None:
    """Those of the library and those of users; an error says what is taken and what was given."""
    own = {None: Written, "damping": WithDamping}.get(examines, WithExamine)(examines)
    with pytest.raises(ValueError, match="which examines 'the weather'"):
        made(transformation, WithExamine("the weather"))
    for policy in (POLICIES[examines], own):
        if examines in TAKEN[transformation]:
            assert made(transformation, policy)
            continue
        with pytest.raises(ValueError, match=r"^refresh\b") as error:
            made(transformation, policy)
        assert repr(policy) in str(error.value) and f"examines {examines!r}" in str(error.value)
        for taken in TAKEN[transformation][1:]:
            assert repr(taken) in str(error.value)


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (Written("eigenpairs"), "examine"),
        (Written("damping"), "examine and max_damping"),
        (WithExamine("damping"), "max_damping"),
    ],
    ids=str,
)
def test_a_policy_needs_what_it_declares(policy: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"it must define {missing}; got .*Wri|With"):
        made("precondition", policy)


SEEN: list[policies.Check] = []


@dataclasses.dataclass(frozen=True)
class TraceGrowth(policies.RefreshPolicy):
    """The example of the module: a verdict without anything but whether to refresh."""

    schedule: policies.Every
    growth: float

    examines = "eigenpairs"

    def examine(self, check: policies.Check) -> policies.Verdict:
        SEEN.append(check)
        grown = jnp.trace(check.statistic) > self.growth * jnp.sum(check.eigenvalues)
        return policies.Verdict(check.first | grown)


@pytest.mark.parametrize("transformation", ["precondition", "in_eigenbasis"])
def test_one_policy_serves_roots_and_bases(transformation: str) -> None:
    """A root has a damping, a basis none. What a verdict leaves out stays as it was."""
    SEEN.clear()
    g = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    # Of two matrices, the trace of the second one's statistic grows fourfold, and only at step 3.
    scales = np.array([[1, 1], [1, 1], [1, np.sqrt(7)], [1, 2]], np.float32)
    policy = TraceGrowth(curvax.every(1), 2.0)
    gradients = [s[:, None, None] * g for s in scales]
    _, states = run(made(transformation, policy), gradients, gradients[0])
    sides = [state.left for state in states]
    # b = 0.5 makes the traces 1/2, 3/4, 7/8 of the first gram, and 1/2, 3/4, 31/8.
    assert [x.refreshes.tolist() for x in sides] == [[1, 1], [1, 1], [1, 2], [1, 2]]
    assert [x.checks.tolist() for x in sides] == [[t, t] for t in (1, 2, 3, 4)]
    for x in sides:
        assert np.array_equal(x.proxy, np.zeros(2))
    assert np.array_equal(sides[0].eigenvalues, sides[1].eigenvalues)
    assert not np.array_equal(sides[1].eigenvalues[1], sides[2].eigenvalues[1])
    assert SEEN
    for check in SEEN:
        if transformation == "in_eigenbasis":
            assert check.root_damping is None
        else:
            assert check.root_damping is not None
            assert (check.root_damping.base_damping, check.root_damping.root) == (EPS, ROOT)
            assert np.array_equal(sides[-1].damping, [EPS, EPS])

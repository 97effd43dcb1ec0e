"""The reference: every public name that is not a method, in groups."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import methods

ROOT = Path(__file__).resolve().parents[2]

GROUPS = {
    "directions": (
        "Directions",
        "Transformations on batches of matrices, for `optax.chain` and `curvax.assemble`. "
        "[Parts](../docs/parts.md) explains how they compose.",
        "momentum orthogonalize scale_by_shape precondition in_eigenbasis in_subspace moment_ratio "
        "blend graft limit_norm_growth normalize_rows normalize_columns standardize_rows "
        "precondition_diagonal scale_by_rows_and_columns row_column_scales normalize_matrices "
        "normalize_neurons scale_by_dion scale_by_weight_norm keep_weight_norm add_cautious_decay "
        "cautious_updates trust_gate clip_logits",
    ),
    "wrappers": (
        "Optimizers and wrappers",
        "Functions that make a full optimizer from a direction, and wrappers of optimizers.",
        "assemble layerwise clip_by_last_norm quantize_state inject_hyperparams skip_spikes "
        "stochastic_rounding kahan_summation master_weights to_int8 from_int8 int8_weights "
        "distribute ema_nesterov primal_average tail_average eval_params",
    ),
    "matrices": (
        "Matrices",
        "Which parameters are matrices, and along which axes ([guide](../docs/matrices.md)).",
        "MatrixRule MatrixAxes find_output_layer on_matrices route rules rules.*",
    ),
    "states": (
        "States",
        "Inspection, checkpoints and shardings ([guide](../docs/checkpoints.md)).",
        "summarize report state_of state_bytes describe_state check_state portable_state "
        "place_state take_over state_sharding state_on_host flat_state extract_adapter Adapter",
    ),
    "storages": (
        "Storages",
        "How factors and bases are stored, for `storage=` ([guide](../docs/combinations.md)).",
        "dense quantized cholesky packed Storage",
    ),
    "policies": ("Refresh policies", "For `refresh=`.", "every policies policies.*"),
    "subspaces": (
        "Subspaces",
        "Values for the arguments of `curvax.in_subspace`.",
        "subspaces subspaces.*",
    ),
    "polar": ("Polar factors", "For `method=`.", "polar polar.*"),
    "eigenbases": ("Eigenbases", "For `method=`.", "eigenbases eigenbases.*"),
    "grafts": ("Grafts", "For `graft=`.", "grafts grafts.*"),
    "weights": (
        "The weights' side",
        "For `weights=` ([guide](../docs/combinations.md#the-weights-side)).",
        "weights weights.*",
    ),
    "recipes": (
        "Recipes",
        "What leads the field, as optimizers ([guide](../docs/combinations.md)).",
        "recipes recipes.*",
    ),
    "published": (
        "Published settings",
        "[All runs](../docs/published.md).",
        "published published.*",
    ),
    "linalg": (
        "Linear algebra",
        "Functions of arrays `(..., m, n)`, and the precision of products, for `products=`.",
        "products inverse_root power_iteration newton_schulz polar_svd polar_qdwh "
        "polar_express NEWTON_SCHULZ_COEFFICIENTS",
    ),
}

MODULES = (
    *(
        "eigenbases",
        "grafts",
        "polar",
        "policies",
        "published",
        "recipes",
        "rules",
        "subspaces",
        "weights",
    ),
)
"""Modules whose members have entries of their own."""


def exported(module: str) -> list[str]:
    """The names in `__all__` of a module of the facade."""
    tree = ast.parse((ROOT / "curvax" / f"{module}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"curvax/{module}.py has no __all__.")


def group(name: str) -> list[str]:
    """The names of a group."""
    found = []
    for entry in GROUPS[name][2].split():
        module, _, rest = entry.partition(".")
        found += [f"{module}.{x}" for x in exported(module)] if rest == "*" else [entry]
    return list(dict.fromkeys(x for x in found if x != "policies.every"))


@functools.cache
def names() -> frozenset[str]:
    """All names with a place in the site."""
    of_methods = {f"{prefix}{name}" for name in methods.rows() for prefix in ("", "scale_by_")}
    return frozenset(of_methods.union(*map(group, GROUPS)))


def missing() -> list[str]:
    """Public names without a place."""
    return sorted(set(exported("__init__")) - names())


def pages() -> dict[str, str]:
    """The pages of the reference, by path."""
    found = {}
    for name, (title, text, _) in GROUPS.items():
        entries = [
            f"::: curvax.{x}\n" + ("    options: {members: false}\n" if x in MODULES else "")
            for x in group(name)
        ]
        found[f"reference/{name}.md"] = "\n".join([f"# {title}", "", text, "", *entries])
    return found

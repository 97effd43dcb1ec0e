"""What 4-bit codes do to a factor: Tables 1 and 9, Proposition B.1 and C.4 of 4-bit Shampoo.

    python -m benchmarks.papers.quantization           # orders 32 … 256, a minute
    python -m benchmarks.papers.quantization --full    # order 512 as well, 5 minutes

Vanilla quantization (VQ) stores a factor's off-diagonal entries in 4 bits, Cholesky quantization
(CQ) those of its Cholesky factor (Li et al., arXiv:2412.10663). Compared are

- the toy matrix of Table 9, for which the diagonal is coded as well;
- Table 1: A = U Λ Uᵀ with eigenvalues spaced geometrically from 1e-3 to 1e3, U from the QR
  decomposition of a Gaussian matrix; the relative error (NRE) and the angle (AE, radians) of the
  inverse fourth root after coding, each summed over 100 matrices. The paper does not state order,
  damping and solver, so several are shown, among them the damping that comes closest to the printed
  digits: what has to hold is that CQ is the better one;
- the largest error of the map from numbers to codes (Proposition B.1 says 2^-b);
- bytes of factors and roots for whole models (C.4), from shapes alone.

Everything but the bytes is computed in float64, with the library's own codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import curvax
from curvax.transforms.linalg._eigh import from_eigen
from curvax.transforms.linalg._inverse_root import root_eigenvalues
from curvax.transforms.storage._codec import MAPS, Codec, decode, encode
from curvax.transforms.storage._quantized import decode_square, encode_square

from . import _report

STORAGES = {
    "float32": curvax.dense(),
    "VQ": curvax.quantized(),
    "CQ": curvax.cholesky(),
    "CQ+EF": curvax.cholesky(error_feedback=0.95),
}
COLORS = {
    "float32": _report.BLACK,
    "VQ": _report.VERMILION,
    "CQ": _report.BLUE,
    "CQ+EF": _report.SKY,
}


# Table 9.

TOY = np.array([[10.0, 3.0], [3.0, 1.0]])
PUBLISHED_TOY = {
    "VQ": "[[10.00, 3.60], [3.60, 1.11]]: 11.275, -0.164",
    "CQ": "[[10.00, 3.60], [3.60, 1.42]]: 11.310, 0.109",
}


def toy() -> dict[str, np.ndarray]:
    """Table 9: all entries coded, in one tile."""

    def coded(x: np.ndarray) -> np.ndarray:
        codec = Codec()
        return np.asarray(decode_square(encode_square(jnp.asarray(x), codec, False), codec))

    c = coded(np.linalg.cholesky(TOY))
    return {"VQ": coded(TOY), "CQ": c @ c.T}


def describe(x: np.ndarray) -> str:
    """A 2 × 2 matrix and its eigenvalues, as the paper prints them."""
    entries = ", ".join("[{:.2f}, {:.2f}]".format(*row) for row in x)
    return f"[{entries}]: " + "{:.3f}, {:.3f}".format(*np.linalg.eigvalsh(x)[::-1])


# Table 1.


class Setting(NamedTuple):
    """One way to take the inverse root; `exact` takes the reference's without damping."""

    solver: str
    damping: str
    eps: float
    exact: bool = False

    def __str__(self) -> str:
        kind = "" if self.damping == "absolute" else f" {self.damping}"
        solver = "coupled Newton" if self.solver == "coupled_newton" else "eigh"
        return f"{solver},{kind} ε = {self.eps:g}{', A without' if self.exact else ''}"


CLOSEST = 2e-3
"""The relative damping that brings CQ's error closest to the published one; found by trying."""

SETTINGS = (
    Setting("eigh", "relative", 1e-6),
    Setting("eigh", "relative", 1e-6, exact=True),
    Setting("eigh", "absolute", 1e-3),
    Setting("eigh", "floor", 1e-3),
    Setting("eigh", "absolute", 1e-6),
    Setting("coupled_newton", "relative", 1e-6),
    Setting("eigh", "relative", CLOSEST),
    Setting("coupled_newton", "relative", CLOSEST),
)
MATRICES = 100
DECADES = 3.0  # eigenvalues from 1e-3 to 1e3
PUBLISHED = {"VQ": (46.141, 27.187), "CQ": (9.188, 9.204)}  # NRE, AE
ROOT = 4


def draw(order: int, decades: float, key: jax.Array) -> jax.Array:
    """U Λ Uᵀ with eigenvalues from 10^-decades to 10^decades."""
    u, _ = jnp.linalg.qr(jax.random.normal(key, (order, order)))
    a = (u * jnp.logspace(-decades, decades, order)) @ u.T
    return (a + a.T) / 2


def stored(a: jax.Array) -> dict[str, jax.Array]:
    """What is left of `a` in each storage; the paper's ε, 1e-6, is added before CQ's Cholesky."""
    vq, cq = (
        curvax.quantized(min_elements=1),
        curvax.cholesky(damping_mode="absolute", min_elements=1),
    )
    start = cq.encode_factor(jnp.eye(a.shape[-1], dtype=a.dtype), None)
    return {
        "VQ": vq.decode_factor(vq.encode_factor(a, None)),
        "CQ": cq.decode_factor(cq.encode_factor(a, start)),
    }


def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """NRE and AE of `y` from `x` (Eq. 9)."""
    cosine = jnp.vdot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y))
    angle = jnp.arccos(jnp.clip(cosine, -1, 1))
    return jnp.stack([jnp.linalg.norm(x - y) / jnp.linalg.norm(x), angle])


@jax.jit(static_argnames=("order", "settings"))
def errors(
    order: int, decades: float, key: jax.Array, settings: tuple[Setting, ...]
) -> tuple[jax.Array, jax.Array]:
    """NRE and AE `(settings, storages, 2)` for one matrix, and VQ's smallest eigenvalue."""
    a = draw(order, decades, key)
    forms = [a, *stored(a).values()]
    pairs = [jnp.linalg.eigh(x) for x in forms]

    def roots(setting: Setting) -> list[jax.Array]:
        if setting.solver != "eigh":
            options = {"damping_mode": setting.damping, "solver": setting.solver}
            return [curvax.inverse_root(x, ROOT, setting.eps, **options)[0] for x in forms]
        eps = [0.0 if setting.exact else setting.eps, *[setting.eps] * (len(forms) - 1)]
        return [
            from_eigen(q, root_eigenvalues(d, ROOT, e, setting.damping))
            for (d, q), e in zip(pairs, eps, strict=True)
        ]

    found = []
    for setting in settings:
        exact, *others = roots(setting)
        found.append(jnp.stack([distances(exact, x) for x in others]))
    return jnp.stack(found), pairs[1][0][0]


def synthetic(orders: tuple[int, ...], seed: int) -> dict[int, dict[str, Any]]:
    """By order: sums over the matrices of NRE and AE, by setting, and how often VQ is indefinite.

    Also for how many of the matrices CQ is better, `(settings, 2)`.
    """
    results = {}
    for order in orders:
        keys = jax.random.split(jax.random.key(seed), MATRICES)
        measured = [
            jax.device_get(errors(order, DECADES, key, SETTINGS))
            for key in tqdm(keys, desc=f"Table 1, order {order}", leave=False)
        ]
        found = np.stack([x for x, _ in measured])
        results[order] = {
            "settings": [str(s) for s in SETTINGS],
            "sums": found.sum(0),
            "better": (found[:, :, 1] < found[:, :, 0]).sum(0),
            "indefinite": sum(bool(smallest < 0) for _, smallest in measured),
        }
    return results


def synthetic_table(results: dict[int, dict[str, Any]]) -> str:
    """Table 1 beside what is published."""
    printed = [f"{x:.1f}" for x in PUBLISHED["VQ"]] + [f"{x:.2f}" for x in PUBLISHED["CQ"]]
    rows = [["published: not stated", "", *printed, "yes", "", ""]]
    for order, result in results.items():
        for name, sums, better in zip(
            result["settings"], result["sums"], result["better"], strict=True
        ):
            holds = "yes" if (sums[1] < sums[0]).all() else "**no**"
            digits = [f"{x:.3g}" for x in sums.ravel()]
            counts = "{} / {}".format(*better)
            rows.append([name, f"{order}", *digits, holds, counts, f"{result['indefinite']}"])
    titles = [
        "root",
        "order",
        "VQ: NRE",
        "VQ: AE",
        "CQ: NRE",
        "CQ: AE",
        "CQ below VQ",
        f"of {MATRICES}, CQ better: NRE / AE",
        "VQ indefinite",
    ]
    return _report.table(titles, rows)


WIDTHS = np.arange(0.25, 4.01, 0.25)  # decades above and below 1
WIDTH_ORDER = 128
WIDTH_MATRICES = 10


def by_width(seed: int) -> np.ndarray:
    """NRE `(widths, matrices, storages)` with the first of `SETTINGS`."""
    keys = jax.random.split(jax.random.key(seed + 1), WIDTH_MATRICES)
    return np.array(
        [
            [errors(WIDTH_ORDER, width, key, SETTINGS[:1])[0][0, :, 0] for key in keys]
            for width in tqdm(WIDTHS, desc="widths", leave=False)
        ]
    )


# Proposition B.1.


def map_errors() -> list[tuple[str, float, float, float]]:
    """For maps and bits: half the largest gap, the largest error on a grid, and 2^-b."""
    rows = []
    for map in MAPS[:2]:
        for bits in (4, 8):
            codec = Codec(bits, map=map)
            values = codec.values()
            rows.append(
                (
                    f"{map}, b = {bits}",
                    float(np.max(np.diff(values)) / 2),
                    float(np.max(np.abs(map_error(codec)))),
                    2.0**-bits,
                )
            )
    return rows


GRID = np.linspace(-1, 1, 20001)


def map_error(codec: Codec) -> np.ndarray:
    """The error after coding of every number of `GRID`, with the scale 1."""
    # Every tile of one row has a 1 in its first column.
    tiles = -(-GRID.size // (codec.block - 1))
    padded = np.zeros(tiles * (codec.block - 1))
    padded[: GRID.size] = GRID
    padded = padded.reshape(tiles, -1)
    x = jnp.asarray(np.concatenate([np.ones((tiles, 1)), padded], axis=1).reshape(1, -1))
    y = np.asarray(decode(encode(x, codec), codec, x.shape[-1]) - x)
    return y.reshape(tiles, -1)[:, 1:].ravel()[: GRID.size]


# Section C.4.


def resnet34(stem: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Kernels of a ResNet-34."""
    kernels: dict[str, tuple[int, ...]] = {"conv1": (stem, stem, 3, 64)}
    before = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"layer{stage}_{block}"
            kernels[f"{name}/conv1"] = (3, 3, before, width)
            kernels[f"{name}/conv2"] = (3, 3, width, width)
            if before != width:
                kernels[f"{name}/conv_shortcut"] = (1, 1, before, width)
            before = width
    return {**kernels, "classifier": (512, classes)}


def vit_small(patch: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Kernels of a ViT-Small, whose query, key and value are one matrix."""
    kernels: dict[str, tuple[int, ...]] = {"conv_patches": (patch, patch, 3, 384)}
    for block in range(12):
        kernels[f"block{block}/qkv"] = (384, 3 * 384)
        kernels[f"block{block}/projection"] = (384, 384)
        kernels[f"block{block}/up"] = (384, 4 * 384)
        kernels[f"block{block}/down"] = (4 * 384, 384)
    return {**kernels, "classifier": (384, classes)}


MODELS = {
    "ResNet-34, ImageNet": resnet34(7, 1000),
    "ResNet-34, CIFAR-100": resnet34(3, 100),
    "ViT-Small/16, ImageNet": vit_small(16, 1000),
    "ViT-Small/4, CIFAR-100": vit_small(4, 100),
}
PUBLISHED_MB = {  # Table 3: peak memory beyond the base optimizer's
    "ResNet-34, CIFAR-100": {
        "float32": 1882.6 - 1254.7,
        "VQ": 1341.0 - 1254.7,
        "CQ": 1319.5 - 1254.7,
        "CQ+EF": 1341.0 - 1254.7,
    },
    "ViT-Small/4, CIFAR-100": {
        "float32": 3448.9 - 2930.0,
        "VQ": 3001.7 - 2930.0,
        "CQ": 2983.7 - 2930.0,
        "CQ+EF": 3001.7 - 2930.0,
    },
}


def model_bytes() -> dict[str, dict[str, int]]:
    """Bytes of Shampoo's state without its base, for every model and storage."""
    sizes = {}
    for model, shapes in MODELS.items():
        kernels = {
            name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
            for name, shape in shapes.items()
        }
        sizes[model] = {
            name: curvax.state_bytes(curvax.shampoo(0.1, base=None, storage=storage), kernels)
            for name, storage in STORAGES.items()
        }
    return sizes


def bytes_table(sizes: dict[str, dict[str, int]]) -> str:
    rows = []
    for model, found in sizes.items():
        for name, number in found.items():
            published = PUBLISHED_MB.get(model, {})
            ratios = (found["float32"] / number, number / found["VQ"])
            cells = [f"{number / 2**20:.1f}", f"{ratios[0]:.2f}", f"{ratios[1]:.3f}"]
            if published:
                mb = published[name]
                cells += [f"{mb:.1f}", f"{published['float32'] / mb:.2f}"]
                cells += [f"{mb / published['VQ']:.3f}"]
            else:
                cells += ["", "", ""]
            rows.append([f"{model}: {name}", *cells])
    titles = ["model", "MiB", "float32 / this", "this / VQ"]
    return _report.table([*titles, *(f"published: {x}" for x in ("MB", *titles[2:]))], rows)


# The figure.


def plot(widths: np.ndarray, sizes: dict[str, dict[str, int]], seed: int) -> Figure:
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (spectrum, width), (map_, memory) = figure.subplots(2, 2)

    a = draw(WIDTH_ORDER, DECADES, jax.random.key(seed))
    spectra = {"A": jnp.linalg.eigvalsh(a)}
    spectra |= {name: jnp.linalg.eigvalsh(x) for name, x in stored(a).items()}
    index = np.arange(1, WIDTH_ORDER + 1)
    for (name, d), color in zip(
        spectra.items(), (_report.BLACK, COLORS["VQ"], COLORS["CQ"]), strict=True
    ):
        d = np.asarray(d)
        style: dict[str, Any] = (
            {"linestyle": "-", "zorder": 3} if name == "A" else {"linestyle": "", "marker": "."}
        )
        negative = f", {(d < 0).sum()} negative" if (d < 0).any() else ""
        spectrum.plot(index, d, color=color, label=name + negative, **style)
    spectrum.axhline(0, color="gray", linestyle=":")
    spectrum.set_yscale("symlog", linthresh=1e-3)
    spectrum.set(
        title=f"(a) Eigenvalues before and after, order {WIDTH_ORDER}",
        xlabel="index",
        ylabel="value (linear below 1e-3)",
    )
    spectrum.legend(frameon=False, loc="upper left")

    for i, name in enumerate(("VQ", "CQ")):
        color, values = COLORS[name], widths[:, :, i]
        width.plot(10 ** (2 * WIDTHS), values.mean(1), "o-", color=color, label=name)
        width.fill_between(
            10 ** (2 * WIDTHS), values.min(1), values.max(1), color=color, alpha=0.2, lw=0
        )
    width.axvline(10 ** (2 * DECADES), color="gray", linestyle=":", label="Table 1")
    width.set(
        title=f"(b) Relative error of A^(-1/4), {SETTINGS[0]}",
        xlabel="condition number of A",
        ylabel=f"NRE, mean and range of {WIDTH_MATRICES}",
        xscale="log",
        yscale="log",
    )
    width.legend(frameon=False)

    for name, color in (("linear2", _report.GREEN), ("linear", _report.ORANGE)):
        codec = Codec(map=name)
        map_.plot(GRID, np.abs(map_error(codec)), color=color, lw=1, label=f"{name}, b = 4")
    map_.axhline(2**-4, color="black", linestyle=":", label="2^-4 (Prop. B.1)")
    map_.set(
        title="(c) Error of the map",
        xlabel="x, a share of the tile's scale",
        ylabel="|D(Q(x)) - x|",
    )
    map_.legend(frameon=False, loc="upper center", ncols=3, columnspacing=1)
    map_.set_ylim(0, 0.15)

    bar = 0.8 / len(STORAGES)
    for i, name in enumerate(STORAGES):
        mib = [found[name] / 2**20 for found in sizes.values()]
        places = np.arange(len(sizes)) + (i - (len(STORAGES) - 1) / 2) * bar
        memory.bar(places, mib, bar, color=COLORS[name], label=name)
        for place, number in zip(places, mib, strict=True):
            memory.text(place, 11, f"{number:.0f}", color="white", fontsize=9, ha="center")
        given = [
            (place, PUBLISHED_MB[model][name])
            for place, model in zip(places, sizes, strict=True)
            if model in PUBLISHED_MB
        ]
        memory.plot(*zip(*given, strict=True), "kx", label="published" if i == 3 else None)
    memory.set_xticks(range(len(sizes)), [model.replace(", ", "\n") for model in sizes])
    memory.set(title="(d) Factors and roots", ylabel="MiB", yscale="log", ylim=(10, 3000))
    memory.legend(frameon=False, ncols=len(STORAGES) + 1, columnspacing=1)
    for axis in (spectrum, width, map_):
        axis.grid(alpha=0.3)
    return figure


def main() -> None:
    """Runs everything and writes tables, numbers and figure."""
    args = _report.arguments(__doc__, full="order 512 as well")
    sizes = model_bytes()
    jax.config.update("jax_enable_x64", True)
    orders = (32, 64, 128, 256, *((512,) if args.full else ()))
    toys, maps = toy(), map_errors()
    found = synthetic(orders, args.seed)
    widths = by_width(args.seed)
    toy_rows = [["original", describe(TOY), ""]]
    toy_rows += [[name, describe(x), PUBLISHED_TOY[name]] for name, x in toys.items()]
    map_rows = [
        [
            name,
            *(f"{x:.5f}" for x in (gap, measured, bound)),
            "yes" if gap <= bound else f"**no**, {gap / bound:.3f} of it",
        ]
        for name, gap, measured, bound in maps
    ]
    width_rows = [
        [f"1e{2 * w:g}", *(f"{x:.3g}" for x in values.mean(0))]
        for w, values in zip(WIDTHS, widths, strict=True)
        if 2 * w % 1 == 0
    ]
    body = "\n\n".join(
        [
            "Table 9, a 2 × 2 matrix whose diagonal is coded as well: entries, then eigenvalues.",
            _report.table(["", "ours", "published"], toy_rows),
            f"Table 1, {MATRICES} synthetic matrices of each order, diagonals kept, tiles of "
            f"{Codec().block}. Errors of A^(-1/4) are sums over the matrices. In the paper order, "
            'damping and solver are not stated. "A without": the exact A is not damped, the coded '
            f"one is. ε = {CLOSEST:g} was chosen here, as it comes closest to the published CQ.",
            synthetic_table(found),
            f"Means of NRE over {WIDTH_MATRICES} matrices of order {WIDTH_ORDER} by the condition "
            f"number, {SETTINGS[0]}:",
            _report.table(["condition number", "VQ", "CQ"], width_rows),
            "Proposition B.1: the largest error of a number coded in b bits, as a share of its "
            "tile's scale. Half the largest gap between neighboring codes; the largest on a grid "
            f"of {GRID.size:,} numbers, through the library; the paper's bound.",
            _report.table(["map", "half gap", "on the grid", "2^-b", "bound holds"], map_rows),
            "Section C.4: bytes of factors and roots, from shapes alone; kernels of convolutions "
            "have all axes but the last as rows, blocks of at most 1200, balanced. Published are "
            "differences of peak memory (Table 3), which hold temporaries too; the patch size of "
            "its ViT-Small is not stated.",
            bytes_table(sizes),
        ]
    )
    settings = {"orders": orders, "matrices": MATRICES, "decades": DECADES, "root": ROOT}
    results = {
        "toy": {name: x.tolist() for name, x in toys.items()},
        "published_synthetic": PUBLISHED,
        "synthetic": {
            str(order): {
                key: x.tolist() if isinstance(x, np.ndarray) else x for key, x in result.items()
            }
            for order, result in found.items()
        },
        "axes": "sums: setting, (VQ, CQ), (NRE, AE); better: setting, (NRE, AE)",
        "nre_by_width": {
            "decades": WIDTHS.tolist(),
            **{name: widths[:, :, i].tolist() for i, name in enumerate(("VQ", "CQ"))},
        },
        "map_errors": maps,
        "bytes": sizes,
        "published_mb": PUBLISHED_MB,
    }
    title = "4-bit factors: vanilla and Cholesky quantization (Tables 1 and 9, B.1, C.4)"
    figure = plot(widths, sizes, args.seed)
    _report.write(args, "quantization", title, body, settings, results, figure)


if __name__ == "__main__":
    main()

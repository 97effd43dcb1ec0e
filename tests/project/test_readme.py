"""The code of the README and of docs/ runs as it stands, and links lead to files."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks_of(page):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    """What the README's Python blocks define, run one after the other."""
    blocks = blocks_of(README)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return names


PAGES = sorted(ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_run(page):
    names: dict = {}
    with jax.numpy_rank_promotion("allow"):  # as users have it
        for block in blocks_of(page):
            exec(compile(block, str(page), "exec"), names)


def test_every_combination_takes_steps():
    page = ROOT / "docs" / "combinations.md"
    names: dict = {}
    params = {"a": {"kernel": jax.ShapeDtypeStruct((96, 128), "float32")}}
    optimizers = []
    for line in re.split(r"(?m)^(?=optimizer = )", "".join(blocks_of(page))):
        exec(compile(line, str(page), "exec"), names)
        optimizers += [names["optimizer"]] if "optimizer" in names else []
    assert len(optimizers) == page.read_text(encoding="utf-8").count("\noptimizer = ") > 0
    for optimizer in optimizers:
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        assert updates["a"]["kernel"].shape == (96, 128)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def links_of(page):
    """The targets of a page's links and pictures, without other sites and places within pages."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def test_pages_tell_users_of_the_threads_that_the_tests_forbid():
    """With LAPACK's own threads, a refresh beside other processes can take 100 times as long."""
    settings = "OPENBLAS_NUM_THREADS"
    assert f'"{settings}", "1"' in (ROOT / "tests" / "conftest.py").read_text()
    assert f"Set `{settings}=1`" in (ROOT / "docs" / "performance.md").read_text()


def test_links_lead_to_files():
    pages = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("benchmarks/results/**/*.md")]
    links = {page.relative_to(ROOT): links_of(page) for page in pages}
    assert "docs/performance.md" in links[README.relative_to(ROOT)]
    missing = [
        (str(page), link)
        for page, targets in links.items()
        for link in targets
        if not (ROOT / page.parent / link).exists()
    ]
    assert not missing


def test_the_step_compiles_once(namespace):
    assert namespace["step"]._cache_size() == 1


def test_the_combined_method_gives_an_orthogonal_direction(namespace):
    params = {"a": {"kernel": np.eye(3, dtype=np.float32) + 1}}
    optimizer = namespace["optimizer"]
    updates, _ = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x))(params)
    norm = float(np.linalg.norm(updates["a"]["kernel"]))
    assert abs(norm - 0.02 * 3**0.5) < 1e-6  # an orthogonal 3×3 matrix has the norm √3

"""MaxText's own training loop, on its synthetic data, with its checkpoints.

`maxtext_mesh` is `maxtext_experts` on eight simulated devices, FSDP × experts.
"""

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
import optax
import orbax.checkpoint as ocp
from _check import check_restart, watched
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils.sharding import nnx_construct_named_sharding

import curvax

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.hlo import collectives

# MaxText's own Muon leaves the output layer to AdamW too.
RULE = dataclasses.replace(curvax.rules.maxtext, output_layer="auto")
SETTINGS = {
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 3,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 4,
    "attention": "dot_product",
    "dtype": "float32",
    "learning_rate": 0.01,
    "learning_rate_schedule_steps": 200,
    "async_checkpointing": "false",
    "enable_goodput_recording": "false",
    "monitor_goodput": "false",
    "skip_jax_distributed_system": "true",
}
EXPERTS = {
    "decoder_block": "mixtral",
    "base_num_decoder_layers": 8,
    "per_device_batch_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 64,
    "sparse_matmul": "false",
    "megablox": "false",
}
FSDP, EXPERT = 2, 4
MESH = {
    "per_device_batch_size": 1,
    "ici_fsdp_parallelism": FSDP,
    "ici_expert_parallelism": EXPERT,
}
MODELS = {
    "maxtext_scanned": (curvax.muon, {}),
    "maxtext_unrolled": (curvax.soap, {"scan_layers": "false", "base_num_decoder_layers": 2}),
    "maxtext_experts": (curvax.muon, EXPERTS),
    "maxtext_mesh": (curvax.muon, EXPERTS | MESH),
}


def abstract(tree: Any, mesh: Any) -> Any:
    """The shapes of variables, with the shardings that MaxText gives them."""
    shardings = nnx_construct_named_sharding(tree, mesh)
    shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return nnx.as_pure(jax.tree.map(shape, tree, shardings))


def with_shardings(optimizer: Any, params: Any, mesh: Any) -> Any:
    """The optimizer, whose first state says how each array lies.

    MaxText shards an array as the metadata of its variable say, and replicates others. Copies of
    parameters, such as the moments of AdamW, are such variables already.
    """
    shardings = curvax.state_sharding(optimizer, params, mesh)
    known = lambda x: isinstance(x, nnx.Variable)  # noqa: E731

    def said(x: Any, sharding: Any) -> Any:
        return x if known(x) else nnx.Variable(x, out_sharding=sharding.spec)

    def init(params: Any) -> Any:
        return jax.tree.map(said, optimizer.init(params), shardings, is_leaf=known)

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def check_exchange(optimizer: Any, model: Any, mesh: Any) -> None:
    """A device receives in a step what docs/distribution.md promises at most.

    Twice its share of the matrices each way, and those of its updates that other devices have too.
    """
    made = nnx.eval_shape(lambda model: nnx.Optimizer(model, optimizer, wrt=nnx.Param), model)
    params = abstract(nnx.state(model, nnx.Param), mesh)
    state = abstract(made.opt_state, mesh)
    outputs = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(optimizer.update, out_shardings=outputs).lower(params, state, params)
    found = collectives(step.compile().as_text())
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 2]  # of all layers
    whole = sum(x.size for x in matrices)
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in matrices)
    share = whole / mesh.size
    received = sum(x.received(mesh.size) for x in found) / 4 / share
    bound = 4 + own / share - 1
    print(f"a device receives {received:.2f} of its share, at most {bound:.2f}")
    assert 0 < received <= bound
    assert not any(x.inside for x in found)


def train(client: str, folder: Path, steps: int) -> tuple[list[float], dict]:
    method, changes = MODELS[client]
    on_mesh = client == "maxtext_mesh"
    jax.config.update("jax_num_cpu_devices", FSDP * EXPERT if on_mesh else 1)

    def get_optimizer(config: Any, schedule: Any, model: Any = None, mesh: Any = None) -> Any:
        make = functools.partial(
            method, schedule, weight_decay=config.adam_weight_decay, matrices=RULE
        )
        if not on_mesh:
            return watched(client, make())
        params = nnx.state(model, nnx.Param)
        optimizer = watched(client, make(mesh=jax.tree.map(lambda x: x.sharding, params)))
        optimizer = with_shardings(optimizer, params, mesh)
        with logical_axis_rules(config.logical_axis_rules):
            check_exchange(optimizer, model, mesh)
        return optimizer

    optimizers.get_optimizer = get_optimizer
    metrics = folder / f"metrics{steps}.jsonl"
    places = {"run_name": "run", "base_output_directory": folder, "metrics_file": metrics}
    settings = {**SETTINGS, **changes, **places, "steps": steps}
    config = Path(maxtext.__file__).parent / "configs" / "base.yml"
    arguments = [f"{name}={value}" for name, value in settings.items()]
    pre_train.main(["train", str(config), *arguments])
    losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
    saved = folder / "run" / "checkpoints" / str(steps - 1) / "items"
    return losses, ocp.PyTreeCheckpointer().restore(saved)


if __name__ == "__main__":
    losses = check_restart(train, list(MODELS))
    if "maxtext_mesh" in losses:
        # Rounding grows over the steps: another number of devices adds in another order.
        np.testing.assert_allclose(losses["maxtext_mesh"], losses["maxtext_experts"], rtol=1e-3)

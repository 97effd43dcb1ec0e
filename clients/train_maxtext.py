"""MaxText's own training loop, on its synthetic data, with its checkpoints."""

import dataclasses
import json
from pathlib import Path

import maxtext
import orbax.checkpoint as ocp
from _check import check_restart, watched
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as pre_train

import curvax

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
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 64,
    "sparse_matmul": "false",
    "megablox": "false",
}
MODELS = {
    "maxtext_scanned": (curvax.muon, {}),
    "maxtext_unrolled": (curvax.soap, {"scan_layers": "false", "base_num_decoder_layers": 2}),
    "maxtext_experts": (curvax.muon, EXPERTS),
}


def train(client: str, folder: Path, steps: int) -> tuple[list[float], dict]:
    method, changes = MODELS[client]
    optimizers.get_optimizer = lambda config, schedule, model=None, mesh=None: watched(
        client, method(schedule, weight_decay=config.adam_weight_decay, matrices=RULE)
    )
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
    check_restart(train, list(MODELS))

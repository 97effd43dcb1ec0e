"""A small Llama 3 of tunix (NNX), on sequences made here: all weights, or factors of LoRA alone.

tunix' trainer, loop and checkpoints are as they are. A restart skips the batches that it has seen.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import qwix
from _check import check_restart, watched
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import hooks, peft_trainer

import curvax

SYMBOLS, LENGTH = 32, 16
CONFIG = llama.ModelConfig(
    num_layers=2,
    vocab_size=SYMBOLS,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)


def batches() -> Iterator[peft_trainer.TrainingInput]:
    """Each sequence counts in steps of its own."""
    for i in itertools.count():
        start, step = np.random.default_rng(i).integers(1, 4, (2, 16, 1))
        tokens = (start + step * np.arange(LENGTH)) % SYMBOLS
        yield peft_trainer.TrainingInput(tokens.astype(np.int32), np.ones_like(tokens, bool))


def model_input(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
    rows, length = batch.input_tokens.shape
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
        "attention_mask": jnp.broadcast_to(jnp.tri(length, dtype=bool), (rows, length, length)),
    }


class Losses(hooks.TrainingHooks):
    """The losses of all steps."""

    def __init__(self):
        self.found = []

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.found.append(train_loss)

    def ignore(self, *arguments):
        """Takes no notice."""

    on_train_start = on_train_end = on_train_step_start = ignore
    on_eval_step_start = on_eval_step_end = ignore


def train(client: str, folder: Path, steps: int) -> tuple[list[float], dict]:
    model = llama.Llama3(CONFIG, rngs=nnx.Rngs(0))
    if client == "tunix_lora":
        factors = qwix.LoraProvider(module_path=".*(proj|lm_head)", rank=4, alpha=8.0)
        model = qwix.apply_lora_to_model(model, factors, **model.get_model_input())
    checkpoints = folder / "checkpoints"
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=10**6,
        max_steps=steps,
        checkpoint_root_directory=str(checkpoints.absolute()),
    )
    optimizer = watched(client, curvax.muon(0.03))
    losses = Losses()
    trainer = peft_trainer.PeftTrainer(model, optimizer, config)
    trainer.with_gen_model_input_fn(model_input)
    trainer.with_training_hooks(losses)
    trainer.train(batches())
    saved = checkpoints / str(steps)
    return losses.found, {
        part: ocp.PyTreeCheckpointer().restore(saved / part)
        for part in ("model_params", "optimizer_state")
    }


if __name__ == "__main__":
    check_restart(train, ["tunix", "tunix_lora"])

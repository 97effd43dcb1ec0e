"""A small Llama of Levanter (Haliax), on sequences made here.

Levanter's trainer, loop and checkpoints are as they are. A restart skips the batches that it has
seen. Its loss gives `jnp.mean` a mask of floats, which JAX refuses, so the loss is Optax's.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from _check import check_restart, watched
from levanter.checkpoint import CheckpointerConfig
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import curvax

if not hasattr(jax.core, "is_constant_dim"):  # which Haliax calls, and JAX 0.12 no longer has
    jax.core.is_constant_dim = lambda size: isinstance(size, int)

SYMBOLS = hax.Axis("vocab", 32)
BATCH = hax.Axis("batch", 16)
CONFIG = LlamaConfig(
    seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
)


def batches(first: int) -> Iterator[hax.NamedArray]:
    """Each sequence counts in steps of its own."""
    for i in itertools.count(first):
        start, step = np.random.default_rng(i).integers(1, 4, (2, BATCH.size, 1))
        tokens = (start + step * np.arange(CONFIG.seq_len)) % SYMBOLS.size
        yield hax.named(tokens.astype(np.int32), (BATCH, CONFIG.Pos))


def loss_of(model, tokens, *, key=None):
    logits = model(tokens, AttentionMask.causal(), key=key).array[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens.array[:, 1:]).mean()


def train(client: str, folder: Path, steps: int) -> tuple[list[float], dict]:
    config = TrainerConfig(
        id="run",
        tracker=NoopConfig(),
        log_dir=folder,
        train_batch_size=BATCH.size,
        num_train_steps=steps,
        checkpointer=CheckpointerConfig(str(folder / "checkpoints")),
        require_accelerator=False,
    )
    optimizer = watched(client, curvax.muon(0.03))
    checkpointer = config.checkpointer.create(config.id)
    losses = []
    with Trainer(config, optimizer, loss_of, add_default_hooks=False) as trainer:
        trainer.add_hook(lambda step: losses.append(step.loss))
        state = trainer.initial_state(
            jax.random.PRNGKey(0), model_init=lambda: CONFIG.build(SYMBOLS, key=jax.random.key(1))
        )
        last = trainer.train(state, batches(int(state.step)))
        checkpointer.on_step(last, force=True)
        checkpointer.wait_until_finished()
    return losses[:-1], eqx.filter((last.state.model, last.state.opt_state), eqx.is_array)


if __name__ == "__main__":
    check_restart(train, ["levanter"])

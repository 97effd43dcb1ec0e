"""A small Llama of penzai, whose blocks are one stack, by penzai's own `StatefulTrainer`.

The trainer gives the optimizer a tuple of parameters, each with its label and named axes.
"""

import pickle
from pathlib import Path

import jax
import optax
from _check import check_restart, watched
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed.basic_training import StatefulTrainer

import curvax

SYMBOLS, LENGTH = 17, 16
CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=2,
    query_head_multiplier=2,
    embedding_dim=32,
    projection_dim=8,
    mlp_hidden_dim=64,
    num_decoder_blocks=3,
    vocab_size=SYMBOLS,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
    use_layer_stack=True,
)


def loss_fn(*, model, state, rng):
    start = jax.random.randint(rng, (8, 1), 0, SYMBOLS)
    tokens = (start + 3 * jax.numpy.arange(LENGTH + 1)) % SYMBOLS
    scores = model(pz.nx.wrap(tokens[:, :-1], "batch", "seq"))
    logits = scores.unwrap("batch", "seq", "vocabulary")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), state, {"loss": losses.mean()}


def train(client: str, folder: Path, until: int):
    """Trains until so many steps, from the checkpoint in the folder."""
    model = llamalike_common.build_llamalike_transformer(CONFIG, jax.random.key(1))
    optimizer = watched(client, curvax.muon(0.01))
    trainer = StatefulTrainer.build(jax.random.key(0), model, optimizer, loss_fn)
    parameters = pz.unbind_params(model)[1]
    file = folder / "checkpoint.pickle"
    if file.exists():
        values, trainer.state.value = pickle.loads(file.read_bytes())
        for parameter, value in zip(parameters, values, strict=True):
            parameter.update(value)
    losses = [trainer.step()["loss"] for _ in range(int(trainer.state.value.step), until)]
    kept = pz.freeze_params(parameters), trainer.state.value
    file.write_bytes(pickle.dumps(jax.device_get(kept)))
    return losses, kept


check_restart(train, ["penzai"])

"""Keras on JAX: a transformer with `fit`, and Keras's own backup of an interrupted training."""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from _check import check_restart, watched

import curvax

SYMBOLS, WIDTH, LENGTH = 17, 32, 16


class FromOptax(keras.optimizers.Optimizer):
    """An Optax transformation as an optimizer of Keras; its state is saved with the model."""

    def __init__(self, transformation):
        super().__init__(learning_rate=1.0)  # the transformation has its own
        self.transformation = transformation

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        state = self.transformation.init({v.path: v.value for v in variables})
        arrays, self.structure = jax.tree.flatten(state)
        self.arrays = [self.variable_of(array) for array in arrays]

    def variable_of(self, array):
        return self.add_variable(array.shape, lambda *_, **__: array, array.dtype, name="state")

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        params = {v.path: v.value for v in trainable_variables}
        state = jax.tree.unflatten(self.structure, [v.value for v in self.arrays])
        grads = dict(zip(params, grads, strict=True))
        updates, state = self.transformation.update(grads, state, params)
        for variable, array in zip(self.arrays, jax.tree.leaves(state), strict=True):
            variable.assign(array)
        for variable in trainable_variables:
            variable.assign_add(updates[variable.path])


def transformer() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(SYMBOLS, WIDTH, name="tokens")(tokens)
    x = keras.layers.Conv1D(WIDTH, 3, padding="causal", name="stem_conv")(x)
    for i in range(2):
        h = keras.layers.LayerNormalization(name=f"norm_{i}a")(x)
        attention = keras.layers.MultiHeadAttention(4, WIDTH // 4, name=f"attention_{i}")
        x = x + attention(h, h, use_causal_mask=True)
        h = keras.layers.LayerNormalization(name=f"norm_{i}b")(x)
        h = keras.layers.Dense(2 * WIDTH, "gelu", name=f"up_{i}")(h)
        x = x + keras.layers.Dense(WIDTH, name=f"down_{i}")(h)
    return keras.Model(tokens, keras.layers.Dense(SYMBOLS, name="head")(x))


def train(client: str, folder: Path, epochs: int) -> tuple[list, dict]:
    model = transformer()
    optimizer = curvax.muon(1e-2, matrices=curvax.rules.keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(FromOptax(watched(client, optimizer)), loss)
    start = np.random.default_rng(0).integers(SYMBOLS, size=(64, 1))
    tokens = (start + 3 * np.arange(LENGTH + 1)) % SYMBOLS
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    history = model.fit(
        tokens[:, :-1],
        tokens[:, 1:],
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        callbacks=[backup],
        verbose=0,
    )
    state = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return history.history["loss"], state


if __name__ == "__main__":
    check_restart(train, ["keras"], steps=10)

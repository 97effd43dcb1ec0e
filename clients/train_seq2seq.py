"""Flax's seq2seq example (Linen): an encoder and a decoder of LSTM cells learn to add numbers.

The example makes its data from Python's `random`, and has no checkpoints: the state of both is kept
with `flax.serialization`.
"""

import pickle
import random
from pathlib import Path

import optax
import train as seq2seq
from _check import check_restart, watched
from absl import flags
from flax import serialization

import curvax


def train(client: str, folder: Path, steps: int) -> tuple[list, dict]:
    optax.adam = lambda learning_rate: watched(
        client, curvax.soap(learning_rate, refresh=5, matrices=curvax.rules.linen)
    )
    flags.FLAGS(["train", "--hidden_size=32", "--batch_size=32", "--learning_rate=0.02"])
    random.seed(0)
    done, saved = 0, folder / "state.msgpack"
    get_train_state, train_step, losses = seq2seq.get_train_state, seq2seq.train_step, []
    if saved.exists():
        done, generator = pickle.loads((folder / "data.pickle").read_bytes())
        random.setstate(generator)

    def continued(*arguments):
        state = get_train_state(*arguments)
        return serialization.from_bytes(state, saved.read_bytes()) if done else state

    def recorded(*arguments):
        state, metrics = train_step(*arguments)
        losses.append(metrics["loss"])
        return state, metrics

    seq2seq.get_train_state, seq2seq.train_step = continued, recorded
    flags.FLAGS.num_train_steps = steps - done
    state = seq2seq.train_and_evaluate(str(folder))
    saved.write_bytes(serialization.to_bytes(state))
    (folder / "data.pickle").write_bytes(pickle.dumps((steps, random.getstate())))
    return losses, serialization.to_state_dict(state)


if __name__ == "__main__":
    check_restart(train, ["seq2seq"])

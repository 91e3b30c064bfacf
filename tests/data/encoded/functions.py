"""Functions that other processes can import in no time, and processes that are none."""

import os
import pickle
import sys
import time
from typing import ClassVar

import numpy as np

from redco_cli.data.encoded.child import _until_error
from redco_cli.errors import ExampleError, PluginError
from redco_cli.row_notes import note_rows


def encode(example):
    """Texts of 0 to 4 tokens; some are left out, noted, or refused."""
    number = example["id"]
    if example.get("bad"):
        raise ExampleError("encode_fn", f"{number} is bad", "yes") from KeyError("why")
    if number % 10 == 3:
        return None
    if number % 10 == 4:
        note_rows("with a 4", [0])
    ids = np.full(number % 5, number, np.int32)
    return {"input_ids": ids, "labels": ids}


def slowly(example):
    """As `encode`; and what process it is, in which a plugin may print."""
    time.sleep(0.001)
    print("noise")
    print("noise", file=sys.stderr)
    found = encode(example)
    here = [int(name in sys.modules) for name in ("jax", "redco_cli.run")]
    where = [os.getpid(), int(os.environ.get("JAX_PLATFORMS") == "cpu"), *here] if example["id"] % 100 == 0 else [0]
    return found and {**found, "process": np.array(where if example.get("tell") else [0], np.int32)}


def fatally(example):
    """Ends any process but that of the test."""
    if example["id"] == 700 and os.getpid() != example["parent"]:
        os._exit(3)
    return encode(example)


class Counting:
    """Gives another result each time, as a function does that counts in its module."""

    def __init__(self):
        self.calls = 0

    def __call__(self, example):
        self.calls += 1
        return {"input_ids": np.array([self.calls], np.int32)}


class Here:
    """A child that is none: what it is sent is pickled, and encoded in a thread."""

    ended: ClassVar[list] = []

    def give(self, encode):
        self.encode = pickle.loads(encode)

    def encoded(self, examples):
        return pickle.loads(pickle.dumps(_until_error(self.encode, pickle.loads(pickle.dumps(examples)))))

    def kill(self):
        self.ended.append(self)

    def close(self):
        pass


class Dying(Here):
    """One that ends over one of the examples."""

    def encoded(self, examples):
        if any(example["id"] == 700 for example in examples):
            raise ChildProcessError("it ended by SIGKILL")
        return super().encoded(examples)


class Blaming(Here):
    """One that fails over an example that does not fail elsewhere."""

    def encoded(self, examples):
        found = super().encoded(examples)
        for number, example in enumerate(examples):
            if example["id"] == 700:
                return [*found[:number], (PluginError("p.py", "only here", ""), ())]
        return found

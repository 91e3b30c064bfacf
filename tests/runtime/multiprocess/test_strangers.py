"""Two processes that train, while strangers come to their port: as if nobody had come."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.multiprocess.processes import ended, exact, free_port, records, run_several, start
from tests.runtime.rendezvous.strangers import Strangers
from tests.runtime.rendezvous.test_strangers import overheard

SHORT = ["mesh={data: 2}", "train.steps=12"]


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("secret", ["0123456789abcdef", None])
def test_two_processes_meet_and_train_whoever_else_comes(secret: str | None) -> None:
    """Each second of their starts, on a port under fire; with a secret, and without one on one machine."""
    run_several(["train", "recipe.yaml", "output_dir=expected", *SHORT], 2, 1)
    seed = random.SystemRandom().randrange(10**6)
    dice, recorded = random.Random(seed), overheard()
    environment = {"REDCO_TIMEOUT": "60"} if secret is None else {"REDCO_TIMEOUT": "60", "REDCO_SECRET": secret}
    came = 0
    for number in range(3):
        port = free_port()
        with Strangers(port + 1, seed + number, recorded) as strangers:
            time.sleep(dice.uniform(0, 1))
            children = []
            for process in dice.sample(range(2), 2):
                arguments = ["train", "recipe.yaml", f"output_dir=run-{number}", *SHORT]
                children.append(start(arguments, process, 2, port, **environment))
                time.sleep(dice.uniform(0, 5))
            ends = ended(children, 120)
        assert [end.code for end in ends] == [0, 0], (seed, [end.err[-2000:] for end in ends])
        came += sum(strangers.came.values())
        exact(f"run-{number}", "expected", 12)
    assert came > 100, seed


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_run_goes_on_whoever_knocks_at_its_port_while_it_trains() -> None:
    port, long = free_port(), ["mesh={data: 2}", "train.steps=100000", "eval.every=100000", "checkpoint.every=100000"]
    children = [start(["train", "recipe.yaml", *long], process, 2, port) for process in range(2)]
    deadline = time.monotonic() + 120
    while not Path("run/metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with Strangers(port + 1, 0, overheard()):
        time.sleep(5)
        assert [child.poll() for child in children] == [None, None]
    children[1].send_signal(signal.SIGTERM)
    assert [end.code for end in ended(children, 60)] == [75, 75]
    assert max(step for _, step in records("run")) > 10

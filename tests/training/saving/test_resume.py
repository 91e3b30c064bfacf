"""Runs that are killed, interrupted, or moved to other devices, against the uninterrupted run."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_cli.plugin.contract import Loss
from redco_cli.plugin.state import Variables
from redco_cli.run import train
from redco_cli.training.records.metrics import read_records
from redco_cli.training.state import new_state
from redco_cli.training.step import make_train_step
from tests.training.tiny import EXAMPLES, assert_same_run, damages, files, interrupted, put, recorded, times_seen

STREAM = ["plugin.options.stream=true", "data.shuffle_buffer=7"]
CUBE = "{data: 2, fsdp: 2, tensor: 2}"
QUICK = "eval.predict=false"
TRAIN = "import sys; from redco_cli.run import train; train('recipe.yaml', sys.argv[1:])"


def kill_when(phase: str, dice: random.Random, *overrides: str) -> None:
    """Trains in a process of its own, and ends it with SIGKILL: anywhere, or while it trains, or while it saves."""
    lines = Path("run/metrics.jsonl")
    before = lines.stat().st_size if lines.exists() else 0
    with subprocess.Popen([sys.executable, "-c", TRAIN, *overrides], stderr=subprocess.DEVNULL) as process:
        if phase == "anywhere":
            time.sleep(dice.uniform(0, 6))
        else:
            grown = before + dice.randrange(1, 20_000)
            while process.poll() is None:
                saving = any(Path("run").glob("*.orbax-checkpoint-tmp"))
                trained = lines.exists() and (lines.stat().st_size > grown or lines.stat().st_size < before)
                if saving if phase == "saving" else trained:
                    break
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.02))
        process.kill()


def kill_and_complete(phases: list[str], *overrides: str) -> None:
    """A run that is killed again and again equals the uninterrupted one."""
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed of the phases: {seed}")
    dice = random.Random(seed)
    train("recipe.yaml", ["output_dir=whole", *overrides])
    for phase in phases:
        kill_when(phase, dice, "plugin.options.seconds=0.02", *overrides)
    subprocess.run([sys.executable, "-c", TRAIN, "plugin.options.seconds=0.02", *overrides], check=True)
    rows = Counter((row["kind"], row["step"]) for row in read_records(Path("run/metrics.jsonl")))
    assert set(rows.values()) == {1}
    assert_same_run("run", "whole", max(step for _, step in rows))
    assert not list(Path("run").glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_killed_run_ends_as_if_nothing_happened() -> None:
    kill_and_complete(["training", "saving"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("data", [[], STREAM], ids=["indexed", "stream"])
def test_a_run_that_is_killed_twenty_times_ends_as_if_nothing_happened(data: list[str]) -> None:
    phases = ["anywhere", "training", "saving", "training"] * 5
    kill_and_complete(phases, "train.steps=60", "checkpoint.every=2", "eval.every=5", *data)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("data", [[], STREAM], ids=["indexed", "stream"])
def test_a_run_continues_wherever_it_was_stopped(data: list[str]) -> None:
    """At a checkpoint, at an evaluation, in the middle of an epoch, and where one ends inside a batch."""
    train("recipe.yaml", ["output_dir=whole", *data])
    for step in (3, 4, 5, 8, 11):
        interrupted(step, *data)
    outcome = train("recipe.yaml", data)
    assert outcome.step == 12
    assert_same_run("run", "whole")


@pytest.mark.slow
def test_a_stream_of_files_continues_where_it_was_stopped(project: Path) -> None:
    rows = [{"x": [float(i % 7), *[0.5] * 7], "y": i % 3, "id": i} for i in range(EXAMPLES)]
    (project / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plugin = (project / "plugin.py").read_text()
    plugin = plugin.replace("np.asarray(e[name])", 'np.asarray(e[name], np.float32 if name == "x" else np.int32)')
    (project / "plugin.py").write_text(plugin)
    source = ["data.train={path: json, data_files: train.jsonl}", "data.streaming=true", "data.shuffle_buffer=7", QUICK]
    train("recipe.yaml", ["output_dir=whole", *source])
    interrupted(4, *source)
    place = json.loads(Path("run/checkpoint-4/meta/metadata").read_text())["data"]
    assert (place["epoch"], place["given"], place["size"]) == (3, 4, 7)  # 64 examples of epochs of 20
    started = recorded("run")[0]
    with Path("run/metrics.jsonl").open("a") as file:  # the evaluation put off by the signal, then killed before a save
        file.write(json.dumps({**started, "step": 4, "time": 0.0}) + "\n")
    train("recipe.yaml", source)
    assert_same_run("run", "whole")
    drawn = sum((Counter(times) for times in times_seen(recorded("run")).values()), Counter())
    assert sum(drawn.values()) == 12 * 16
    assert max(drawn.values()) - min(drawn.values()) == 1  # nine epochs of 20, and twelve examples of the tenth


STATEFUL = """

class Stateful:
    def __init__(self, examples):
        self.examples, self.at = examples, 0

    def __iter__(self):
        while self.at < len(self.examples):
            self.at += 1
            with open("read", "a") as file:
                file.write(f"{self.at - 1}\\n")
            yield self.examples[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stream_of(examples, kind):
    own = {"own": Stateful, "late": Late, "numbered": Numbered}
    if kind in own:
        return own[kind](examples)
    import datasets
    rows = [{**example, "x": example["x"].tolist()} for example in examples]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    if kind == "shuffled":
        return stream.shuffle(seed=1, buffer_size=20)  # its state leaves out what the buffer holds
    if kind == "uncopied":
        stream.lock = __import__("threading").Lock()
    return stream


class Late(Stateful):
    def __iter__(self):
        while self.at < len(self.examples):
            yield self.examples[self.at]
            self.at += 1


class Numbered(Stateful):
    def state_dict(self):
        return {0: self.at}

    def load_state_dict(self, state):
        self.at = state.get(0, self.at)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["own", "datasets", "uncopied", "shuffled", "late", "numbered"],
)
def test_a_stream_of_a_plugin_continues_where_it_was_stopped(
    project: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a bookmark, where it has a state, and a copy of it that takes that over gives the same examples."""
    plugin = (project / "plugin.py").read_text() + STATEFUL
    for old, new in (
        (f"n = {EXAMPLES} if", "n = 400 if"),
        ("return Stream(examples)", f"return stream_of(examples, {kind!r})"),
        ("np.asarray(e[name])", 'np.asarray(e[name], np.float32 if name == "x" else np.int32)'),
    ):
        assert old in plugin
        plugin = plugin.replace(old, new)
    (project / "plugin.py").write_text(plugin)
    source = ["plugin.options.stream=true", "data.shuffle_buffer=7", "train.steps=28", QUICK]
    train("recipe.yaml", ["output_dir=whole", *source])
    interrupted(21, *source)
    place = json.loads(Path("run/checkpoint-21/meta/metadata").read_text())["data"]
    Path("read").unlink(missing_ok=True)
    train("recipe.yaml", source)
    assert_same_run("run", "whole", 28)
    bookmarks = place and [bookmark for _, bookmark in place["bookmarks"] if bookmark is not None]
    assert bool(bookmarks) == (kind in ("own", "datasets"))
    warned = "state_dict() does not restore the same examples, so a resumed run reads the stream from its start"
    assert (warned in capsys.readouterr().err) == (kind in ("shuffled", "late"))
    if kind == "own":
        read = Counter(map(int, Path("read").read_text().split()))
        assert set(range(12)) <= read.keys()  # by which the plugin is proved, and those of epoch 1
        assert not any(read[index] for index in range(64, 192))


def test_random_keys_follow_from_the_seed_and_the_step() -> None:
    """A step whose loss is what the key draws: the same for the same seed and step, and nothing else of the state."""

    def loss(variables: Variables, batch: jax.Array, key: jax.Array, train: bool) -> Loss:
        return Loss(jax.random.normal(key) + 0.0 * variables.params["w"], jnp.ones(()), {})

    def drawn(seed: int, step: int) -> float:
        state = replace(new_state({"w": jnp.ones(())}, frozenset(), optax.sgd(1.0)), step=jnp.int32(step))
        place = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
        train_step = make_train_step(loss, optax.sgd(1.0), lambda _: 1.0, seed, place)
        return float(jax.jit(train_step)(state, {"x": jnp.zeros((1, 2))})[1]["loss"])

    assert drawn(0, 5) == drawn(0, 5)
    assert len({drawn(0, 5), drawn(0, 6), drawn(1, 5)}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_the_best_evaluation_outlives_the_process() -> None:
    """The best one is at the start, before any step, and no checkpoint has it: none of the later ones replaces it."""
    overrides = ["train.learning_rate=3.0", "train.warmup=0", "checkpoint.every=2", "eval.every=4", "checkpoint.keep=9"]
    overrides += [QUICK]
    interrupted(7, *overrides)
    outcome = train("recipe.yaml", overrides)
    losses = {row["step"]: row["loss"] for row in recorded("run") if row["kind"] == "eval"}
    assert losses.keys() == {0, 4, 8, 12}
    assert losses[0] == min(losses.values())
    for step in (2, 7, 12):
        meta = json.loads(Path(f"run/checkpoint-{step}/meta/metadata").read_text())
        assert meta["best"] == [0, losses[0]]
    assert losses[outcome.best] == min(losses[4], losses[8], losses[12])  # the best one that is saved


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("{data: 8}", [CUBE]),
        ("{data: 8}", ["{fsdp: 8}"]),
        ("{data: 8}", ["{data: 1}"]),
        ("{data: 8}", ["{tensor: 8}"]),
        ("{fsdp: 8}", [CUBE, "{data: 1}", "{data: 8}"]),
    ],
)
def test_other_devices_continue_with_the_same_examples(first: str, then: list[str]) -> None:
    """Losses to 1e-5 of the uninterrupted run, and every example once in each epoch, ids counted on the devices."""
    train("recipe.yaml", ["output_dir=whole", f"mesh={first}", QUICK])
    for step, mesh in zip((4, 7, 9), [first, *then[:-1]], strict=False):
        interrupted(step, f"mesh={mesh}", QUICK)
    train("recipe.yaml", [f"mesh={then[-1]}", QUICK])
    whole, moved = recorded("whole"), recorded("run")
    assert [(row["kind"], row["step"]) for row in moved] == [(row["kind"], row["step"]) for row in whole]
    for row, expected in zip(moved, whole, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5), row["step"]
    seen = times_seen(moved)
    assert seen == times_seen(whole)
    drawn: Counter[int] = Counter()
    for step, times in seen.items():
        drawn.update(times)
        assert set(drawn.values()) <= {step * 16 // 20, step * 16 // 20 + 1}  # epochs of 20
    assert seen.keys() == set(range(1, 13))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("project")
def test_no_damage_of_a_checkpoint_makes_a_wrong_run() -> None:
    """Every file of the newest checkpoint cut off, flipped or removed: whole runs that continue beside it."""
    train("recipe.yaml", ["output_dir=whole"])
    interrupted(10)
    saved, dice = Path("run/checkpoint-10"), np.random.default_rng(1)
    backup = {name: (saved / name).read_bytes() for name in files(saved)}
    subprocess.run(["cp", "-r", "run", "kept"], check=True)
    assert len(backup) > 20
    for name, content in backup.items():
        for kind, changed in damages(content, dice):
            if kind not in ("cut", "flipped", "removed"):
                continue
            subprocess.run(["rm", "-r", "run"], check=True)
            subprocess.run(["cp", "-r", "kept", "run"], check=True)
            put(saved / name, changed)
            train("recipe.yaml")
            print(name, kind)
            assert_same_run("run", "whole")

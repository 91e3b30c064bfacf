"""Examples encoded by several processes: what one process would have made of them, whatever becomes of the others."""

import os
import subprocess
import sys
import time
from contextlib import closing, suppress

import pytest

from redco_cli.data.encoded import parallel
from redco_cli.data.encoded.encode import encoded_once
from redco_cli.data.encoded.outcome import outcome_of, same_outcome
from redco_cli.data.encoded.parallel import Others, outcomes
from redco_cli.errors import DataError
from tests.data.encoded.functions import Blaming, Counting, Dying, Here, encode, fatally, slowly

N = 3000


class Slow(list):
    """Examples that take their time to be read, so that others have come when some are left."""

    def __iter__(self):
        for example in super().__iter__():
            if isinstance(example, Exception):
                raise example
            if example["id"] < 500:
                time.sleep(0.0005)
            yield example


class Indexed(list):
    """Examples that are read several at once."""

    def __getitems__(self, indices):
        return list(Slow(self[index] for index in indices))


@pytest.fixture
def at_once(monkeypatch):
    """Others are begun with the first example, and are threads."""
    for name, value in (("_LOOK", 0.0), ("_EACH", 1e-9), ("Child", Here)):
        monkeypatch.setattr(parallel, name, value)
    monkeypatch.setattr(Here, "ended", [])


def run(function=encode, examples=None, most=3):
    """The outcomes, and what was told."""
    told = []
    examples = Slow({"id": number} for number in range(N)) if examples is None else examples
    with closing(outcomes(function, examples, N, Others(most, told.append, told.append, worth=0.0))) as found:
        return list(found), told


def serial(function=encode, examples=None):
    return [outcome_of(function, example) for example in examples or ({"id": number} for number in range(N))]


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(same_outcome, found, expected))


@pytest.mark.usefixtures("at_once")
def test_everything_comes_in_order():
    begun = []
    found, told = run()
    assert_same(found, serial())
    assert told == []
    assert len(Here.ended) == 3
    assert begun == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("child", "message"), [(Dying, "since others cannot: it ended by SIGKILL"), (Blaming, None)], ids=["dies", "blames"]
)
def test_what_another_cannot_is_done_here(monkeypatch, child, message):
    monkeypatch.setattr(parallel, "Child", child)
    found, told = run()
    assert_same(found, serial())
    assert told == ([f"one process encodes all examples, {message}"] if message else [])


@pytest.mark.usefixtures("at_once")
def test_functions_and_examples_that_cannot_be_sent():
    found, told = run(lambda example: encode(example))
    assert_same(found, serial())
    assert len(told) == 1
    assert told[0].startswith("one process encodes all examples, since others cannot: ")
    assert "lambda" in told[0]

    examples = Slow({"id": number, "any": (lambda: 0) if number == 1000 else 0} for number in range(N))
    found, told = run(examples=examples)
    assert_same(found, serial())
    assert len(told) == 1


@pytest.mark.usefixtures("at_once")
def test_a_function_with_a_memory_is_not_given_away():
    found, told = run(Counting())
    assert [int(text["input_ids"][0]) for text, _ in found] == list(range(1, N + 1))
    assert told == ["encode_fn gives other results in another process: one process encodes all examples"]


@pytest.mark.usefixtures("at_once")
def test_the_first_error_in_order_is_that_of_one_process():
    """With what caused it, which does not come from elsewhere."""
    examples = Indexed({"id": number, "bad": number in (1000, 1001, 2000)} for number in range(N))
    examples[2500] = DataError("train.jsonl:2501", "no JSON")

    def done():
        return encoded_once(
            encode,
            examples,
            measure="input_ids",
            where="p.py",
            kept_at=None,
            done=lambda *_: None,
            others=Others(3, print, print, worth=0.0),
        )

    with pytest.raises(DataError, match=r"^examples\[1000\]: 1000 is bad") as caught:
        done()
    assert isinstance(caught.value.__cause__, KeyError)
    for number in (1000, 1001, 2000):
        examples[number] = {"id": number}
    with pytest.raises(DataError, match=r"train\.jsonl:2501: no JSON"):
        done()


@pytest.mark.usefixtures("at_once")
def test_examples_before_one_that_cannot_be_read_come_first():
    examples = Slow({"id": number} for number in range(N))
    examples[2500] = DataError("train.jsonl:2501", "no JSON")
    found = []
    with (
        closing(outcomes(encode, examples, N, Others(3, print, print, worth=0.0))) as made,
        pytest.raises(DataError, match="no JSON"),
    ):
        found.extend(made)
    assert len(found) == 2500


@pytest.mark.usefixtures("at_once")
def test_what_is_interrupted_leaves_no_process():
    def interrupting(done, _):
        if done == 2000:
            raise KeyboardInterrupt

    given = {"measure": "input_ids", "where": "p.py", "kept_at": None, "others": Others(3, print, print, worth=0.0)}
    with pytest.raises(KeyboardInterrupt):
        encoded_once(encode, Indexed({"id": number} for number in range(N)), done=interrupting, **given)
    assert len(Here.ended) == 3


def test_few_examples_are_encoded_here(monkeypatch):
    monkeypatch.setattr(parallel, "Child", None)
    found, told = run(examples=[{"id": number} for number in range(N)])
    assert_same(found, serial())
    assert told == []


def test_other_processes(monkeypatch, capfd):
    """Real ones: in order, on no device, without a word, and ended with the work."""
    monkeypatch.setattr(parallel, "_LOOK", 0.1)
    monkeypatch.setattr(parallel, "_EACH", 0.1)
    examples = [{"id": number, "tell": number > 64} for number in range(N)]
    expected = serial(encode, examples)
    capfd.readouterr()
    found, told = run(slowly, examples, most=2)
    out, err = capfd.readouterr()
    assert told == []
    assert out.count("noise") == err.count("noise") < N - 400
    assert_same(
        [(text and {name: text[name] for name in ("input_ids", "labels")}, notes) for text, notes in found], expected
    )
    processes = {tuple(text["process"]) for text, _ in found if text and text["process"][0]}
    others = {one for one in processes if one[0] != os.getpid()}
    assert 1 <= len(others) <= 2
    assert {one[1:] for one in others} == {(1, 0, 0)}
    for process, *_ in others:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.slow
def test_a_process_that_ends_is_told(monkeypatch):
    monkeypatch.setattr(parallel, "_LOOK", 0.1)
    monkeypatch.setattr(parallel, "_EACH", 1e-9)
    examples = Slow({"id": number, "parent": os.getpid()} for number in range(N))
    found, told = run(fatally, examples, most=2)
    assert_same(found, serial(encode, list(examples)))
    assert told in ([], ["one process encodes all examples, since others cannot: it ended with exit code 3"])


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_began_it():
    code = """
import os, pickle
from redco_cli.data.encoded.child import Child
from tests.data.encoded.functions import slowly
child = Child()
child.give(pickle.dumps(slowly))
print(child.encoded([{"id": 100, "tell": True}])[0][0]["process"][0], flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    process = int(run.stdout.split()[-1])
    for _ in range(100):
        with suppress(ProcessLookupError):
            os.kill(process, 0)
            time.sleep(0.1)
            continue
        return
    pytest.fail("it still runs")

"""The first micro-batch in one piece and in two: what does not add up ends a run before its first step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from redco_cli.errors import PluginError, RecipeError
from redco_cli.run import train
from redco_cli.training.cuts import proof

CUT = ["train.micro_batch_size=4", "train.steps=20", "eval.predict=false", "eval.every=20", "eval.at_start=false"]
RETURN = 'return Loss(each.sum(), batch["counted"].sum(), {"accuracy": right.sum()})'


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is long enough with its 20 steps of two micro-batches."""
    monkeypatch.setattr(proof, "MICRO_BATCHES", 40)


@pytest.fixture
def losing(project: Path) -> Callable[[str], None]:
    """Replaces what `loss_fn` returns."""

    def replace(returned: str) -> None:
        text = (project / "plugin.py").read_text()
        assert RETURN in text
        (project / "plugin.py").write_text(text.replace(RETURN, returned))

    return replace


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has the proof note each program that it makes."""
    made: list[object] = []
    make = proof._whole_and_halves

    def noting(*arguments: object, train: bool) -> object:
        made.append(arguments)
        return make(*arguments, train=train)  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "_whole_and_halves", noting)
    return made


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_mean_over_what_counts_unevenly_is_refused(losing: Callable[[str], None], devices: int) -> None:
    losing('return each.sum() / batch["counted"].sum()')
    with pytest.raises(PluginError) as refused:
        train("recipe.yaml", [*CUT, f"mesh.data={devices}"])
    text = str(refused.value)
    assert text.startswith("plugin.py: loss_fn: of the first 4 examples sum and weight are ")
    assert " and 4 in one piece, but " in text
    assert " and 4 in two: train.micro_batch_size would change the result\n" in text
    assert "  -> sum over the examples, Loss(sum, weight); or say whole_batch = True in the plugin" in text
    assert not list(Path("run").glob("checkpoint-*"))


def test_a_term_that_is_added_to_each_part_is_refused(losing: Callable[[str], None]) -> None:
    penalty = '(params["hidden"]["kernel"] ** 2).sum()'
    losing(f'return Loss(0.5 * (each.sum() + {penalty}), batch["counted"].sum())')
    with pytest.raises(PluginError, match="of the first 4 examples sum and weight are"):
        train("recipe.yaml", CUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise", ["", " + 0 * __import__('jax').random.uniform(rng, each.shape)"], ids=["nothing drawn", "noise"]
)
def test_the_loss_of_training_is_compared_where_it_draws_nothing(losing: Callable[[str], None], noise: str) -> None:
    """What gradients at a point that all rows decide about, as sharpness-aware minimisation has, come to."""
    losing(f'return Loss((each{noise}).sum() * (each.mean() if train else 1), batch["counted"].sum())')
    if noise:
        assert train("recipe.yaml", CUT).step == 20
        return
    with pytest.raises(PluginError, match="of the first 4 examples sum and weight are"):
        train("recipe.yaml", CUT)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_loss_that_adds_up_is_proved_once(compared: list[object]) -> None:
    assert train("recipe.yaml", CUT).step == 20
    assert len(compared) == 1


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "settings",
    [["train.steps=19", "eval.every=19"], ["train.micro_batch_size=8"], ["train.micro_batch_size=1"], ["mesh.data=4"]],
    ids=["a short run", "not cut", "cut to single rows", "rows that cannot be halved"],
)
def test_nothing_is_computed_where_it_is_dear_or_impossible(compared: list[object], settings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redco_cli.training.setup.make_train_step", _no_step)
        with pytest.raises(RuntimeError, match="no step"):
            train("recipe.yaml", [*CUT, *settings])
    assert compared == []


def _no_step(*_: object) -> Callable[..., object]:
    def step(*_: object) -> object:
        raise RuntimeError("no step")

    return step


def test_a_batch_that_is_a_whole_is_never_cut(losing: Callable[[str], None], project: Path) -> None:
    losing('return each.sum() / batch["counted"].sum()')
    (project / "plugin.py").write_text((project / "plugin.py").read_text() + "\n\nwhole_batch = True\n")
    with pytest.raises(RecipeError) as refused:
        train("recipe.yaml", CUT)
    assert str(refused.value) == (
        "command line: train.micro_batch_size: 4 would cut the global batch of 8, "
        "but plugin.py says whole_batch = True\n"
        "  -> leave it out; what saves memory then is train.remat: full, more devices, or a smaller global batch"
    )
    assert train("recipe.yaml", [*CUT[1:], "train.steps=2", "eval.every=2"]).step == 2

"""Durations of a recipe in optimizer steps."""

import pytest

from redco_cli.errors import RecipeError
from redco_cli.recipe.schema import Recipe
from redco_cli.training.timeline import make_timeline


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"plugin": {"module": "causal_lm"}, "output_dir": "runs/x", **sections})


def where(key: str) -> str:
    return f"r.yaml:1: {key}"


def test_epochs_and_shares_are_rounded_up() -> None:
    settings = {"global_batch_size": 8, "steps": "3 epochs", "warmup": "10%", "decay": 2}
    timeline = make_timeline(recipe(train=settings, eval={"every": "0.5 epochs"}), 21, where)
    assert timeline.steps == 8  # 63 examples in batches of 8
    assert timeline.warmup == 1
    assert timeline.eval_every == 2
    assert timeline.checkpoint_every == 2
    assert [step for step in range(1, 9) if timeline.due(step, timeline.eval_every)] == [2, 4, 6, 8]
    assert [step for step in range(1, 9) if timeline.due(step, None)] == [8]


def test_a_run_is_saved_where_its_decay_begins() -> None:
    settings = {"steps": 10, "schedule": "wsd", "decay": "30%"}
    timeline = make_timeline(recipe(train=settings, checkpoint={"every": 4}), None, where)
    assert (timeline.branch_point, [step for step in range(1, 11) if timeline.saves(step)]) == (7, [4, 7, 8, 10])
    for other in ({"train": settings, "checkpoint": {"keep": 1}}, {"train": {**settings, "schedule": "cosine"}}):
        assert make_timeline(recipe(**other), None, where).branch_point is None


@pytest.mark.parametrize(
    ("sections", "examples", "text"),
    [
        (
            {"train": {"steps": "2 epochs"}},
            None,
            "r.yaml:1: train.steps: 2 epochs given: the data has no known length, so epochs cannot be counted; give "
            "steps\n  -> give a number of steps",
        ),
        (
            {"train": {"steps": 10, "warmup": 11}},
            5,
            "r.yaml:1: train.warmup: 11 is 11 steps, longer than the run of 10\n  -> warm up for a share, such as 5%",
        ),
        (
            {"train": {"steps": 10}, "eval": {"every": "0%"}},
            5,
            "r.yaml:1: eval.every: 0% is 0 steps\n  -> give at least 1 step",
        ),
    ],
)
def test_durations_that_cannot_work(sections: dict[str, object], examples: int | None, text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make_timeline(recipe(**sections), examples, where)
    assert str(refused.value) == text

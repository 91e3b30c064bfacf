"""The picture of a run."""

import json
import math

import numpy as np
import pytest

from redco_cli.errors import StorageError
from redco_cli.training.records.metrics import METRICS_NAME
from redco_cli.training.records.plot import curve, draw_losses, plot_losses, smoothed, spans_decades


def falling(steps, floor=1.5, nonfinite=()):
    """Train and eval records of a run whose loss falls to `floor`."""
    for step in range(10, steps + 1, 10):
        loss = None if step in nonfinite else floor + 4 * math.exp(-step / 100)
        yield {"step": step, "kind": "train", "loss": loss, "learning_rate": 3e-4 * (1 - step / steps)}
        if step % 100 == 0:
            yield {"step": step, "kind": "eval", "loss": floor + 0.1 + abs(step - 300) / 1000}


def test_the_axes_show_the_records():
    losses, rates = draw_losses(list(falling(400, nonfinite=(50,))), "my-run").axes
    raw, smooth, evaluation, best, bad = losses.lines
    assert losses.get_title(loc="left") == "my-run"
    assert losses.get_yscale() == "linear"
    assert list(raw.get_xdata()) == list(range(10, 401, 10))
    assert math.isnan(raw.get_ydata()[4])
    assert np.isfinite(smooth.get_ydata()).all()
    assert list(evaluation.get_xdata()) == [100, 200, 300, 400]
    assert list(best.get_xdata()) == [300]
    assert list(bad.get_xdata()) == [50]
    labels = [label.get_text() for label in losses.get_legend().get_texts()]
    assert labels == ["train (smoothed)", "eval (best 1.6 at step 300)", "train not finite"]
    np.testing.assert_allclose(rates.lines[0].get_ydata()[:2], [3e-4 * (1 - 10 / 400), 3e-4 * (1 - 20 / 400)])


def test_a_loss_over_decades_gets_a_log_axis():
    assert draw_losses(list(falling(400, floor=0.01)), "x").axes[0].get_yscale() == "log"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 10], False), ([0.1, 5], True), ([0, 100], False), ([-1, 100], False), ([math.nan], False), ([], False)],
)
def test_when_the_loss_axis_is_logarithmic(values, expected):
    assert spans_decades(np.array(values, dtype=np.float64)) is expected


def test_smoothing_keeps_lines_and_removes_noise():
    line = 5 - 0.01 * np.arange(300.0)
    np.testing.assert_allclose(smoothed(line), line, atol=1e-9)
    gaps = line.copy()
    gaps[[0, 100, 101, 299]] = math.nan
    np.testing.assert_allclose(smoothed(gaps), line, atol=1e-9)
    noisy = line + np.random.default_rng(0).standard_normal(300)
    assert np.std(smoothed(noisy) - line) < 0.35
    np.testing.assert_array_equal(smoothed(np.array([math.nan, 2.0, math.nan])), [2.0, 2.0, 2.0])
    assert np.isnan(smoothed(np.full(5, math.nan))).all()


def test_a_curve_takes_what_has_the_value():
    records = [{"step": 0, "kind": "run"}, *falling(20), {"step": 30, "kind": "train", "other": 1.0}]
    found = curve(records, "train", "loss")
    assert list(found.steps) == [10, 20]


@pytest.mark.parametrize("steps", [0, 10, 400], ids=["empty", "one record", "a run"])
def test_the_picture_is_written(tmp_path, steps):
    from matplotlib.image import imread

    (tmp_path / METRICS_NAME).write_text("".join(json.dumps(record) + "\n" for record in falling(steps)))
    png = tmp_path / "loss.png"
    png.write_bytes(b"old")
    plot_losses(tmp_path / METRICS_NAME, png)
    pixels = imread(png)[..., :3]
    assert pixels.shape == (736, 1152, 3)
    blue = np.abs(pixels - np.array([0x2F, 0x6D, 0xB3]) / 255).max(axis=-1) < 0.02
    orange = np.abs(pixels - np.array([0xD1, 0x62, 0x2B]) / 255).max(axis=-1) < 0.02
    assert (blue.sum() > 2000) == (steps == 400)
    assert (orange.sum() > 500) == (steps == 400)
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_NAME, "loss.png"}


def test_a_picture_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / METRICS_NAME).write_text(json.dumps({"step": 1, "kind": "train", "loss": 1.0}))
    with pytest.raises(StorageError) as caught:
        plot_losses(tmp_path / METRICS_NAME, tmp_path / "nowhere/loss.png")
    assert str(caught.value) == (
        f"{tmp_path / 'nowhere/loss.png'}: cannot be written: No such file or directory\n"
        "  -> free space there, or set logging.plot=false"
    )

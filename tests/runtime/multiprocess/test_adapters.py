"""An adapter and the random numbers that it is trained for, on several processes: equal to one process."""

from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import ModelError
from redco_cli.run import train
from tests.runtime.multiprocess.processes import equal_to_one, run_several
from tests.runtime.multiprocess.test_decoder import language
from tests.training.tiny import final_state

__all__ = ["language"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("language")
def test_two_processes_equal_one_and_begin_with_what_one_trained() -> None:
    mesh = "{fsdp: 2, tensor: 2}"
    small = "model.config.vocab_size=260"  # a head that is not trained gives every id alike
    equal_to_one(mesh, 2, 2, "adapter={rank: 4, targets: all_linear}", small)
    for run in ("one", "many", "back", "forth"):
        assert (Path(run) / "base/manifest.json").is_file()
        assert not [name for name in final_state(run, 12) if name.startswith("['params']['model']")]
    still = [small, "train.steps=1", "train.learning_rate=0.0", "eval.every=1"]
    # Random numbers are those of the mesh to the last bit: of another one they are another base, and refused.
    run_several(["train", "recipe.yaml", "adapter={from: many}", "output_dir=new", f"mesh={mesh}", *still], 2, 2)
    expected = final_state("many", 12)
    for name, value in final_state("new", 1).items():
        if name.startswith("['params']"):
            np.testing.assert_array_equal(value, expected[name])
    with pytest.raises(ModelError, match="was trained for a model with other parameters"):
        train("recipe.yaml", ["adapter={from: many}", "output_dir=newer", *still])

"""The cross-entropy of logits: PyTorch's, with its gradient, and no number for a label that is no class."""

import jax
import numpy as np
import pytest
import torch

from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import token_loss


@pytest.mark.parametrize("shape", [(3, 5), (6,)])
def test_a_loss_and_its_gradient_are_those_of_pytorch(shape):
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(*shape, 7)).astype(np.float32)
    labels = draw.integers(0, 7, shape)
    labels.flat[1] = IGNORED_LABEL
    taken = torch.tensor(logits, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(taken.reshape(-1, 7), torch.tensor(labels).reshape(-1), reduction="sum")
    theirs.backward()
    ours, gradient = jax.value_and_grad(lambda given: token_loss(given, labels).sum)(logits)
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-6)
    np.testing.assert_allclose(gradient, taken.grad, atol=1e-6)


def test_accuracy_counts_the_first_of_equally_large_logits():
    logits = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.0, 2.0, 2.0]], np.float32)
    found = token_loss(logits, np.array([0, 1, 2]))
    assert (found.metrics["accuracy"], found.weight) == (2, 3)


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_that_is_no_class_has_no_loss(label):
    assert np.isnan(token_loss(np.zeros((2, 3), np.float32), np.array([0, label])).sum)

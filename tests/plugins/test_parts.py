"""The building blocks of plugins: numbers against PyTorch, shapes, whole error texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin import parts
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.recipe.shipped import shipped_plugins
from redco_cli.row_notes import WITHOUT_LOSS, RowCounts, noting


@pytest.fixture
def logits_and_labels():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=4, size=(3, 7, 11)).astype(np.float32)
    labels = rng.integers(0, 11, size=(3, 7)).astype(np.int32)
    labels[0, 4:] = IGNORED_LABEL
    labels[2, :] = IGNORED_LABEL
    return logits, labels


def torch_loss(logits, labels):
    flat = torch.tensor(logits).reshape(-1, logits.shape[-1]).requires_grad_()
    target = torch.tensor(labels).reshape(-1).long()
    loss = torch.nn.functional.cross_entropy(flat, target, ignore_index=IGNORED_LABEL, reduction="sum")
    loss.backward()
    return loss.item(), flat.grad.numpy().reshape(logits.shape)


def test_token_loss_and_gradient_agree_with_pytorch(logits_and_labels):
    logits, labels = logits_and_labels
    expected, expected_gradient = torch_loss(logits, labels)
    loss = parts.token_loss(jnp.array(logits), jnp.array(labels))
    gradient = jax.grad(lambda x: parts.token_loss(x, jnp.array(labels)).sum)(jnp.array(logits))
    assert loss.sum == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    assert loss.weight == 4 + 7
    hits = (logits.argmax(-1) == labels) & (labels != IGNORED_LABEL)
    assert loss.metrics["accuracy"] == hits.sum() > 0


def test_next_token_loss_pairs_each_position_with_the_label_after_it(logits_and_labels):
    logits, labels = logits_and_labels
    expected, _ = torch_loss(logits[:, :-1], labels[:, 1:])
    loss = parts.next_token_loss(jnp.array(logits), jnp.array(labels))
    assert loss.sum == pytest.approx(expected, rel=1e-6)
    assert loss.weight == 3 + 6


def test_token_loss_takes_classes_and_computes_in_float32():
    logits = np.random.default_rng(1).normal(size=(5, 3)).astype(jnp.bfloat16)
    labels = np.array([0, 1, 2, 1, 0])
    expected, _ = torch_loss(logits.astype(np.float32), labels)
    loss = parts.token_loss(jnp.array(logits), jnp.array(labels))
    assert loss.sum.dtype == jnp.float32
    assert loss.sum == pytest.approx(expected, rel=1e-6)


def test_token_loss_of_nothing_is_zero_with_a_zero_gradient():
    logits, labels = jnp.ones((1, 2, 4)), jnp.full((1, 2), IGNORED_LABEL)
    loss = parts.token_loss(logits, labels)
    gradient = jax.grad(lambda x: parts.token_loss(x, labels).sum)(logits)
    assert (loss.sum, loss.weight, abs(gradient).max()) == (0, 0, 0)


def test_pad_right_and_left():
    ids, mask = parts.pad([[1, 2, 3], [], [4]], 3, value=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    ids, mask = parts.pad([[1, 2], [4]], 3, value=9, side="left")
    assert ids.tolist() == [[9, 1, 2], [9, 9, 4]]
    assert mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    assert ids.dtype == mask.dtype == np.int32


def test_pad_does_not_cut():
    with pytest.raises(ValueError, match=r"^row 1 has 3 elements, but the length is 2$"):
        parts.pad([[1], [1, 2, 3]], 2, value=0)


def test_a_missing_column_is_named_with_those_that_exist():
    with pytest.raises(ExampleError) as caught:
        parts.column([{"text": "a", "id": 1}, {"id": 2, "body": "b"}], "text")
    assert str(caught.value) == (
        "collate_fn: an example has no column 'text'; it has 'body', 'id'\n"
        "  -> name the right column in plugin.options, or rename it in the data"
    )


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (3, str, "holds 3, a number, but text is expected"),
        (None, str, "is null or missing, but text is expected"),
        (["a"], str, "holds ['a'], a list, but text is expected"),
        ("3", int, "holds '3', text, but a whole number is expected"),
        (0.5, int, "holds 0.5, a number, but a whole number is expected"),
        (True, int, "holds True, true or false, but a whole number is expected"),
        ("x" * 99, float, f"holds '{'x' * 59}, text, but a number is expected"),
        (b"a", list, "holds b'a', of type bytes, but a list is expected"),
    ],
)
def test_a_column_of_another_kind_is_refused(value, kind, found):
    with pytest.raises(ExampleError) as caught:
        parts.column([{"x": value}], "x", kind)
    assert str(caught.value) == (
        f"collate_fn: the column 'x' {found}\n"
        "  -> correct that row or leave it out, or name another column in plugin.options"
    )


def test_columns_of_their_kind_pass():
    good = [("", str), (3, int), (np.int32(3), int), (3, float), (np.float32(0.5), float), ([1], list), ((1,), list)]
    assert all(parts.column([{"x": value}], "x", kind) == [value] for value, kind in good)


def test_what_is_cut_empty_or_without_loss_is_noted():
    with noting() as notes:
        parts.column([{"x": "a"}, {"x": " "}, {"x": ""}], "x", str)
        assert parts.cut([[1, 2, 3], [4], [5, 6]], 2) == [[1, 2], [4], [5, 6]]
        assert parts.cut([[1, 2, 3], [4]], 2, keep="end", name="max_target_length") == [[2, 3], [4]]
        parts.note_without_loss(np.array([[1, IGNORED_LABEL], [IGNORED_LABEL, 2]]))
        parts.note_rows("of none", [])
    assert notes == {
        "with an empty 'x'": [1, 2],
        "longer than data.max_length 2, and cut": [0],
        "longer than max_target_length 2, and cut": [0],
        "without a token that carries loss": [0],
    }


def test_counts_read_as_a_line():
    counts = RowCounts()
    assert (counts.line(), counts.nothing_to_learn()) == ("", "")
    counts.add([True, True, False], {"cut": [0, 2], WITHOUT_LOSS: [0, 1]})
    assert counts.line() == "1 of 2 rows cut; 2 without a token that carries loss"
    assert counts.nothing_to_learn() == "nothing to learn: 2 of 2 rows without a token that carries loss; 1 cut"
    counts.add([True], {})
    assert counts.nothing_to_learn() == ""


def test_the_split_of_held_out_keys_is_fixed_and_near_its_share():
    keys = [f"key {number}" for number in range(2000)]
    chosen = [key for key in keys if parts.held_out(key, 0.2)]
    assert 350 < len(chosen) < 450
    assert chosen[:3] == ["key 1", "key 2", "key 7"]
    assert not any(parts.held_out(key, 0.0) for key in keys)
    assert all(parts.held_out(key, 1.0) for key in keys)


def test_builtin_gives_the_same_module_each_time_and_names_the_known():
    assert parts.builtin("seq2seq") is parts.builtin("seq2seq")
    with pytest.raises(PluginError) as caught:
        parts.builtin("seq2sek")
    assert str(caught.value) == (
        f"builtin('seq2sek'): no built-in plugin has this name\n  -> known: {', '.join(shipped_plugins())}"
    )


def test_the_standard_library_is_ascii_source_without_tests():
    modules = parts.standard_library()
    assert list(modules) == sorted(modules)
    assert {"json", "json.decoder", "argparse", "email.mime.text"} <= set(modules)
    assert "def dumps(" in modules["json"]
    assert all(text.isascii() for text in modules.values())
    assert not any({"test", "tests", "idlelib", "numpy"} & set(name.split(".")) for name in modules)
    assert sum(map(len, modules.values())) > 4_000_000


def test_a_python_without_library_source_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(parts.sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(PluginError) as caught:
        parts.standard_library.__wrapped__()
    assert str(caught.value) == (
        f"{tmp_path}: this Python has no library source files\n  -> use a Python installed with them"
    )


def test_rows_are_stacked_with_the_type_of_each_field(context):
    ctx = context("causal_lm", max_length=3)
    rows = [{"input_ids": [1, 2], "weights": np.float32([0.5, 2])}, {"input_ids": [3], "weights": np.int32([])}]
    batch = parts.stack_rows(ctx, rows)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 256], [3, 256, 256]],
        "weights": [[0.5, 2.0, 0.0], [0.0, 0.0, 0.0]],
        "attention_mask": [[1, 1, 0], [1, 0, 0]],
    }
    with pytest.raises(PluginError, match="take encode_fn too"):
        parts.stack_rows(ctx, [{"text": "raw"}])

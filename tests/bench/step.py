"""A training step on CPU beside PyTorch transformers': same model, weights, batch and AdamW, two threads, float32.

    python tests/bench/step.py [--rounds 20] [--profile] [--attention sdpa]

The model is a Llama of 7 million parameters, the batch 8 rows of 256 tokens. PyTorch is eager: its transformers model
in training mode with its own loss, clipping and `torch.optim.AdamW` as they come. Redco is what `redco train` compiles
for one device: the loaded decoder, `next_token_loss` and the train step, with its gradient norm and finite check. Each
has a process of its own: PyTorch's as Python starts it, redco's as `redco train` does. They take turns, so that
whatever else the machine does meets both. The first of a turn's four steps is not timed: in training a step comes after
another, and not after a pause, in which a virtual machine gives memory back to its host. Printed are medians over the
rounds, of medians over a turn; a ratio is PyTorch's time by redco's of the same round: above 1, redco is faster. That
of processor time is disturbed less by neighbours on a shared machine. Losses must agree to one part in a thousand at
every step.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    from redco_cli.runtime.platforms import begin_again_with_large_pages

    os.environ["JAX_PLATFORMS"] = "cpu"
    begin_again_with_large_pages()

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

from redco_cli import load_model
from redco_cli.models.decoder.attention import Attention
from redco_cli.models.decoder.layers import Mlp
from redco_cli.models.decoder.loss import cross_entropy, head_of
from redco_cli.models.decoder.masks import attention_context, layer_traits
from redco_cli.placement import Placement
from redco_cli.plugin.contract import IGNORED_LABEL, Loss
from redco_cli.plugin.state import Variables
from redco_cli.recipe.schema import TrainSection
from redco_cli.runtime.mesh import make_mesh
from redco_cli.sharding.derive import make_plan
from redco_cli.sharding.program.reading import read
from redco_cli.training.optimizer import make_optimizer, with_clipping
from redco_cli.training.state import new_state
from redco_cli.training.step import make_train_step

ROWS, LENGTH, TOLERANCE = 8, 256, 1e-3
TURN = 4
"""Steps of a turn, the one that is not timed among them."""
TRAIN = TrainSection(learning_rate=1e-4, weight_decay=0.1, max_grad_norm=1.0)
LLAMA = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
Step = Callable[[], float]
"""Takes one step, waits for it, and returns the loss before it."""
Timed = Callable[[], tuple[float, float, float]]
"""Takes one step: its loss, seconds of wall time and seconds of processor time."""
LossOf = Callable[[Any, Any, Any, Any], Loss]
"""Of a model, its parameters, a batch and a key."""


def torch_step(model: Any, batch: dict[str, np.ndarray[Any, Any]]) -> Step:
    """PyTorch's step: forward, backward, clipping, AdamW that decays matrices only, as ours does."""
    tensors = {name: torch.tensor(array).long() for name, array in batch.items()}
    matrices = [leaf for leaf in model.parameters() if leaf.ndim >= 2]
    vectors = [leaf for leaf in model.parameters() if leaf.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=TRAIN.learning_rate,
        betas=(TRAIN.b1, TRAIN.b2),
        eps=TRAIN.eps,
        weight_decay=TRAIN.weight_decay,
    )
    model.train()
    model.config.use_cache = False

    def step() -> float:
        loss = model(**tensors).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def redco_step(model: Any, params: Any, batch: dict[str, np.ndarray[Any, Any]], loss_of: LossOf | None = None) -> Step:
    """The step of `redco train` with the loss of a plugin (default: causal_lm), on one device by the derived plan."""
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}

    def loss(variables: Variables, batch: Any, key: Any) -> Any:
        given = (model, variables.params, batch, key)
        found = loss_of(*given) if loss_of else model.next_token_loss(given[1], **batch, rng=key, train=True)
        return replace(found, metrics={name: (value, found.weight) for name, value in found.metrics.items()})

    reading = read(lambda params, batch: loss(Variables(params), batch, jax.random.key(0)).sum, model.abstract, batch)
    placement = Placement(make_mesh(sizes, str), make_plan(reading, sizes, where=str))
    schedule = optax.constant_schedule(TRAIN.learning_rate)
    optimizer = with_clipping(make_optimizer(TRAIN, schedule, getattr(model, "stacked", {})), TRAIN.max_grad_norm)
    abstract = jax.eval_shape(lambda given: new_state(given, frozenset(), optimizer), model.abstract)
    places = placement.following(abstract, model.abstract)
    gathered = placement.gathering(loss)
    train_step = make_train_step(
        lambda variables, batch, key, _: gathered(variables, batch, key), optimizer, schedule, 0, places.trainable
    )
    program = jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))
    state = jax.jit(lambda given: new_state(given, frozenset(), optimizer), out_shardings=places)(params)
    arrays = {name: jnp.asarray(array)[None] for name, array in batch.items()}

    def step() -> float:
        nonlocal state
        state, metrics = program(state, arrays)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return step


def timed(step: Step) -> tuple[float, float, float]:
    """Loss, seconds of wall time and seconds of processor time of one step."""
    wall, processor = time.perf_counter(), time.process_time()
    loss = step()
    return loss, time.perf_counter() - wall, time.process_time() - processor


@contextmanager
def torch_apart(model: Any, batch: dict[str, np.ndarray[Any, Any]], threads: int = 2) -> Iterator[Timed]:
    """`torch_step` in a process of its own, with memory as Python has it where nobody says otherwise."""
    fresh, (here, there) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    process = fresh.Process(target=_answer, args=(there, model, batch, threads), daemon=True)
    with mock.patch.dict(os.environ):
        os.environ.pop("GLIBC_TUNABLES", None)
        process.start()
    there.close()

    def step() -> tuple[float, float, float]:
        here.send(None)
        taken: tuple[float, float, float] = here.recv()
        return taken

    yield step
    here.close()
    process.join()


def _answer(pipe: Any, model: Any, batch: dict[str, np.ndarray[Any, Any]], threads: int) -> None:
    torch.set_num_threads(threads)
    step = torch_step(model, batch)
    with suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(timed(step))


def redco_parts(model: Any, params: Any, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, Callable[[], Any]]:
    """The parts of redco's step, each compiled by itself."""
    config = model.decoder
    ids = jnp.asarray(batch["input_ids"])
    labels = jnp.concatenate([ids[:, 1:], jnp.full((ROWS, 1), IGNORED_LABEL)], axis=1)
    states = jnp.asarray(_states(config.hidden_size))
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    schedule = optax.constant_schedule(TRAIN.learning_rate)
    optimizer = with_clipping(make_optimizer(TRAIN, schedule, model.stacked), TRAIN.max_grad_norm)
    opt_state = optimizer.init(params)
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    context = attention_context(config, positions, positions[None], jnp.ones((ROWS, LENGTH), jnp.int32), None, None)
    first = jax.tree.map(lambda leaf: leaf[0], layer_traits(config))
    attention = Attention(config, jnp.float32, True, model.module.kernel)
    mlp = Mlp(config, config.mlp_width, jnp.float32)

    def head(params: Any, states: Any) -> Any:
        return cross_entropy(states, head_of(params, config), labels, config=config).loss / labels.size

    def update(gradient: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def both_ways(run: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        def pulled(slope: Any, *given: Any) -> Any:
            out, back = jax.vjp(run, *given)
            return back(jnp.broadcast_to(slope, out.shape).astype(out.dtype))

        program = jax.jit(pulled)
        return lambda: jax.block_until_ready(program(jnp.ones((1,) * jax.eval_shape(run, *given).ndim), *given))

    body, adam = partial(model.hidden, input_ids=ids), jax.jit(update)
    forward = jax.jit(body)
    return {
        "layers, forward": lambda: jax.block_until_ready(forward(params)),
        "layers, forward and backward": both_ways(body, params),
        "  one attention": both_ways(
            lambda params, x: attention.apply({"params": params}, x, first, context, None)[0],
            layer["attention"],
            states,
        ),
        "  one MLP": both_ways(lambda params, x: mlp.apply({"params": params}, x), layer["mlp"], states),
        "head and loss": both_ways(head, params, states),
        "clipping and AdamW": lambda: jax.block_until_ready(adam(params, opt_state, params)),
    }


def torch_parts(model: Any, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, Callable[[], Any]]:
    """The same parts of PyTorch's step."""
    ids = torch.tensor(batch["input_ids"]).long()
    states = torch.tensor(_states(model.config.hidden_size), requires_grad=True)
    layer = model.model.layers[0]
    turns = tuple(part.detach() for part in model.model.rotary_emb(states, torch.arange(LENGTH)[None]))
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    fresh = [torch.nn.Parameter(leaf.detach().clone()) for leaf in model.parameters()]
    for leaf in fresh:
        leaf.grad = torch.ones_like(leaf)
    optimizer = torch.optim.AdamW(fresh, lr=TRAIN.learning_rate, weight_decay=TRAIN.weight_decay)

    def both_ways(run: Callable[[], Any]) -> Callable[[], None]:
        def pulled() -> None:
            out = run()
            out.backward(torch.ones_like(out))
            model.zero_grad(set_to_none=True)

        return pulled

    def body() -> Any:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    def head() -> Any:
        logits = model.lm_head(states)
        return model.loss_function(logits=logits, labels=ids, vocab_size=model.config.vocab_size)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(fresh, TRAIN.max_grad_norm)
        optimizer.step()

    return {
        "layers, forward": body,
        "layers, forward and backward": both_ways(body),
        "  one attention": both_ways(lambda: layer.self_attn(states, turns, mask)[0]),
        "  one MLP": both_ways(lambda: layer.mlp(states)),
        "head and loss": both_ways(head),
        "clipping and AdamW": update,
    }


def profile(ours: dict[str, Callable[[], Any]], theirs: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Prints the time of each part by itself: medians over rounds in which the two take turns."""
    print("part by itself, forward and backward where it says no more, ms    redco  torch  ratio")
    for name in ours:
        times = [(_seconds(theirs[name]), _seconds(ours[name])) for _ in range(rounds + 2)][2:]
        torch_ms, redco_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(slow / fast for slow, fast in times)
        print(f"  {name:60}{redco_ms:8.1f}{torch_ms:7.1f}{ratio:7.2f}", flush=True)


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _states(width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(ROWS, LENGTH, width)).astype(np.float32)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's; ours has one for each core it may use")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="PyTorch's")
    parser.add_argument("--profile", action="store_true", help="the parts of both, each by itself")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=N", help="settings of the Llama's config")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    settings = LLAMA | {key: int(value) for key, value in (one.split("=") for one in arguments.set)}
    config = transformers.LlamaConfig(**settings, attn_implementation=arguments.attention)
    peer = transformers.LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model, params = load_model(folder)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    size = sum(leaf.numel() for leaf in peer.parameters())
    print(f"Llama of {size / 1e6:.2f}M parameters {settings}, {ROWS} x {LENGTH} tokens, {arguments.threads} threads")
    with torch_apart(peer, batch, arguments.threads) as theirs:
        compare("a 7M Llama", theirs, redco_step(model, params, batch), arguments.rounds)
    if arguments.profile:
        profile(redco_parts(model, params, batch), torch_parts(peer, batch), arguments.rounds)


def compare(what: str, theirs: Timed, ours: Step, rounds: int) -> None:
    """Takes steps in turn and prints what they took.

    Raises:
        SystemExit: the losses differ.
    """
    for _ in range(2):
        _agree(theirs()[0], ours())
    taken = []
    for _ in range(rounds):
        (their_losses, *slow), (our_losses, *fast) = _turn(theirs), _turn(partial(timed, ours))
        for pair in zip(their_losses, our_losses, strict=True):
            _agree(*pair)
        taken.append((*slow, *fast))
    torch_wall, torch_processor, redco_wall, redco_processor = ([row[index] for row in taken] for index in range(4))
    medians = [1e3 * statistics.median(wall) for wall in (torch_wall, redco_wall)]
    print("ms a step: torch {:.0f}, redco {:.0f}".format(*medians), end="; ")
    processor = statistics.median(a / b for a, b in zip(torch_processor, redco_processor, strict=True))
    print(f"ratio at best {min(torch_wall) / min(redco_wall):.2f}, of processor time {processor:.2f}", end="; ")
    print(f"load {os.getloadavg()[0]:.1f}; losses agree, last {our_losses[-1]:.4f}")
    ratios = [a / b for a, b in zip(torch_wall, redco_wall, strict=True)]
    middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {rounds} rounds)"
    print(f"=> tokens/s of redco / PyTorch transformers, {what}: {middle}")


def _turn(step: Timed) -> tuple[Sequence[float], float, float]:
    """The losses of its steps, and of those that are timed the median wall time and processor time."""
    losses, walls, processors = zip(*(step() for _ in range(TURN)), strict=True)
    return losses, statistics.median(walls[1:]), statistics.median(processors[1:])


def _agree(theirs: float, ours: float) -> None:
    if not abs(theirs - ours) < TOLERANCE * abs(theirs):
        raise SystemExit(f"the losses differ: PyTorch {theirs:.6f}, redco {ours:.6f}")


if __name__ == "__main__":
    main()

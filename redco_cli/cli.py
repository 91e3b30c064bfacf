"""The commands. Each reads its arguments, calls `run`, prints a result; `shell` makes errors exit codes.

Nothing here imports JAX, transformers or datasets before a recipe has been read: a wrong one is refused at once.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from redco_cli.console import hush, masked_tokens, note, prediction, print_error, result, warn, write_result
from redco_cli.console.plan import show_plan
from redco_cli.errors import EXIT_DONE
from redco_cli.recipe.load import load_recipe, load_run, resolved_yaml
from redco_cli.recipe.schema import json_schema
from redco_cli.recipe.starter import copy_starter
from redco_cli.reports import check_prompt, converse, evaluate, read_stdin, runs, show_predictions, show_training
from redco_cli.runtime.platforms import leave_devices_alone, set_up
from redco_cli.runtime.rendezvous.join import joined
from redco_cli.shell import Checkpoint, Commands, Json, Overrides, RecipeArgument, show_warning
from redco_cli.version import __version__

ComputeType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="It computes in; default: bfloat16.")
]
_MOST = 2**20  # examples of a step, and tokens of an example, that are planned
app = typer.Typer(
    name="redco",
    cls=Commands,
    help="Distributed JAX training and inference from a YAML recipe and three functions.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Print an error's Python traceback.")] = False,
) -> None:
    """Distributed JAX training and inference from a YAML recipe and three functions."""
    if version:
        print(f"redco {__version__}")  # noqa: T201 - nothing to draw
        raise typer.Exit(EXIT_DONE)


@app.command(epilog="Example: redco train quickstart train.steps=200 output_dir=runs/short")
def train(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run's directory to continue it.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Train, evaluate and checkpoint a recipe. Run it again to continue where it stopped."""
    with joined(load_run(target, overrides or ()), note, print_error, hush):
        from redco_cli.run import train as run_train

        outcome = run_train(target, overrides or ())
        show_training(outcome, as_json)


@app.command(epilog="Example: redco predict runs/quickstart --input prompts.jsonl --show 4")
def predict(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN|MODEL", help="A run, a recipe, or a model: directory or hub id.")
    ],
    overrides: Overrides = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE|-", help="Examples, JSON lines; default: predict.input or the eval examples."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Predict this text only.")] = None,
    chats: Annotated[bool, typer.Option("--chat", help="Answer what is typed, line by line, until Ctrl-D.")] = False,
    output_file: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Default: OUTPUT_DIR/predictions/NAME.jsonl.")
    ] = None,
    checkpoint: Checkpoint = "last",
    show: Annotated[int, typer.Option("--show", metavar="N", min=0, help="Also print the first N predictions.")] = 0,
    as_json: Json = False,
) -> None:
    """Predict a JSON-lines file, a text or the eval data. In order, each example once; files continue if killed."""
    from redco_cli.prediction.target import load_target

    check_prompt(prompt, chats, input_file, output_file, show, as_json)
    with joined(load_target(target, overrides or ())[0], note, print_error, hush):
        if chats:
            converse(target, overrides or (), checkpoint)
            return
        given = read_stdin() if input_file == "-" else prompt
        from redco_cli.run import predict as run_predict
        from redco_cli.run import predict_examples

        if given is not None and output_file is None:
            show_predictions(predict_examples(target, given, overrides or (), checkpoint=checkpoint), prompt, as_json)
            return
        source = given or input_file
        file = run_predict(target, overrides or (), input=source, output=output_file, checkpoint=checkpoint)
        with file.open(encoding="utf-8") as lines:
            predictions = [json.loads(line) for line in lines]
        if as_json:
            result({"output": str(file), "examples": len(predictions), "predictions": predictions[:show]}, as_json)
            return
        for line in predictions[:show]:
            prediction(line["index"], line["example"], line["prediction"])
        result({"output": str(file), "examples": len(predictions)}, as_json)


@app.command(epilog="Example: redco export runs/instruct --output exported --checkpoint best --dtype bfloat16")
def export(
    target: Annotated[str, typer.Argument(metavar="RUN|RECIPE", help="The output directory of a run, or its recipe.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="Where to: a new or empty directory.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "last",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Of all weights; default: those of model.name, else float32."),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Which one of several models.")] = "model",
    adapter: Annotated[
        bool, typer.Option("--adapter/--merge", help="An adapter alone, as PEFT or diffusers does; default: merged.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a model to transformers and vLLM, or one of `build_model` to `load_model`. Proved by loading it again."""
    from redco_cli.recipe.load import find_run

    load_recipe(find_run(target)[0], overrides or ())
    from redco_cli.trained import export as export_trained

    exported = export_trained(
        target, overrides or (), output=output, checkpoint=checkpoint, dtype=dtype, model=model, adapter=adapter
    )
    document = {
        "directory": str(exported.directory),
        "files": [str(file.relative_to(exported.directory)) for file in exported.files],
        "bytes": exported.nbytes,
        "difference": exported.difference,
    }
    result(document, as_json)


app.command("eval", epilog="Example: redco eval runs/quickstart --checkpoint best eval.predict=true")(evaluate)
app.command(epilog="Example: redco runs runs/short runs/long --plot losses.png")(runs)


@app.command(epilog="Example: redco validate recipes/quickstart.yaml train.steps=100")
def validate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Print the whole recipe with the origin of each value.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a recipe in seconds, without weights. Finds everything that can be wrong with it."""
    loaded = load_recipe(recipe, overrides or ())
    if origins:
        write_result(resolved_yaml(loaded).rstrip("\n"))
        return
    from redco_cli.run import validate as run_validate

    document, sequences = run_validate(recipe, overrides or ())
    if as_json:
        result(document, as_json)
        return
    for warning in document.pop("warnings"):
        warn(warning)
    for sequence in sequences:
        masked_tokens(sequence.tokens, sequence.weights, sequence.title)
    result(document, as_json)
    note("valid")


@app.command(epilog="Example: redco inspect-sharding llama-3.1-8b --devices 8 --device-memory 80GiB")
def inspect_sharding(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE", help="A recipe, a model directory, a hub id, or a preset (--list).")
    ] = "",
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: by --mesh, else all here.")] = None,
    hosts: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of the devices; default: one per 8.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="Such as data=1,fsdp=4,tensor=2; default: the fastest.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of one device, such as 80GiB.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", min=1, max=_MOST, help="Examples per step.")] = None,
    seq_length: Annotated[int | None, typer.Option(metavar="N", min=1, max=_MOST, help="Tokens per example.")] = None,
    dtype: ComputeType = None,
    target: Annotated[str | None, typer.Option(metavar="CHIPS", help="Such as h100:8, v5e:4x4, 2*v6e:16x16.")] = None,
    compile_it: Annotated[
        bool, typer.Option("--compile", help="Compile the step: for the target, the GPUs here, or simulated CPUs.")
    ] = False,
    cycles: Annotated[bool, typer.Option("--cycles", help="As --compile, for a TPU to the end: its cycles.")] = False,
    price: Annotated[float | None, typer.Option(metavar="X", min=0, help="Of a chip-hour: shows costs.")] = None,
    why: Annotated[str | None, typer.Option(metavar="AXES", help="What this mesh costs more, term by term.")] = None,
    diff: Annotated[str | None, typer.Option(metavar="MODEL", help="Another plan, beside this one.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Also draw the plan, as SVG.")] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List built-in models, and families.")] = False,
    as_json: Json = False,
) -> None:
    """Show how a model is split, and if it fits. Needs neither weights nor devices."""
    from redco_cli.models.families.registry import descriptions
    from redco_cli.models.presets import preset_names
    from redco_cli.planning.arguments import devices_to_compile_for, parse_bytes, parse_mesh

    if list_models or not model:
        result({"presets": list(preset_names()), "decoder_families": descriptions()}, as_json)
        return
    sizes = None if mesh is None else parse_mesh(mesh, "--mesh")
    memory = None if device_memory is None else parse_bytes(device_memory, "--device-memory")
    if target is None and compile_it:
        target = devices_to_compile_for(model, devices, hosts, sizes)
    if target is not None:
        leave_devices_alone()
    from redco_cli.planning.inspect import inspect_sharding as run_inspect

    machine: dict[str, Any] = {"devices": devices, "hosts": hosts, "mesh": sizes, "device_memory": memory}
    step: dict[str, Any] = {"batch_size": batch_size, "seq_length": seq_length, "dtype": dtype, "target": target}
    how: dict[str, Any] = {"compile_it": "cycles" if cycles else compile_it, "price": price, "svg": svg}
    other: dict[str, Any] = {"why": None if why is None else parse_mesh(why, "--why"), "diff": diff}
    report = run_inspect(model, **machine, **step, **other, **how)
    if as_json:
        result(report, as_json)
    else:
        show_plan(report)


@app.command(epilog="Example: redco init my-project --recipe instruct")
def init(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to; made if need be.")] = ".",
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Which shipped recipe.")] = "quickstart",
) -> None:
    """Copy a shipped recipe and its plugin to start from."""
    files = copy_starter(Path(directory), recipe)
    for file in files:
        note(f"wrote {file}")
    result({"next": f"redco train {files[0]}"}, False)


@app.command(epilog="Example: redco launch --processes 2 --devices-per-process 2 -- train quickstart")
def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="train, eval or predict, with arguments.")
    ],
    processes: Annotated[int, typer.Option("--processes", metavar="N", min=1, help="How many to start.")],
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices-per-process", metavar="M", min=1, help="Simulated CPU devices here, GPUs in a file to submit."
        ),
    ] = None,
    emit: Annotated[
        Literal["slurm", "jobset"] | None,
        typer.Option("--emit", help="Start nothing, but print the file that a scheduler takes."),
    ] = None,
) -> None:
    """Run a command as several processes. On this machine, or by the file that a scheduler takes."""
    from redco_cli.launch.emit import submission
    from redco_cli.launch.local import launch as start

    if emit is not None:
        print(submission(emit, command, processes, devices), end="")  # noqa: T201 - a file
        return
    raise typer.Exit(start(command, processes, devices))


@app.command(epilog="Example: redco doctor --json")
def doctor(as_json: Json = False) -> None:
    """Show devices, versions, processes, caches and extras."""
    from redco_cli.runtime.doctor import examine

    result(examine(), as_json)


@app.command(epilog="Example: redco schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    print(json.dumps(json_schema(), indent=2))  # noqa: T201 - a file


def main() -> None:
    """The entry point."""
    os.environ.setdefault("USE_TORCH", "0")  # transformers would import it where it is installed, a second for nothing
    set_up()
    warnings.showwarning = show_warning
    app()

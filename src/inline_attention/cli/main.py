"""The command `inline`: argument parsing only. What a command needs is imported when it runs, so that help is quick."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from inline_attention import __version__
from inline_attention.cli.analyze import analyze_app
from inline_attention.cli.data import data_app
from inline_attention.cli.errors import Commands
from inline_attention.cli.printing import say

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(analyze_app, name="analyze")
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")
app.add_typer(bench_app, name="bench")
recipes_app = typer.Typer(help="What can be trained, by which command.")
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")

BenchmarkFolder = Annotated[Path, typer.Option("--output", "-o", help="Folder for results; made if missing.")]
BenchmarkDevice = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
BenchmarkDtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16 or fp32.", show_default="bf16 on a GPU, fp32 on a CPU")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"inline-attention {__version__}")
        raise typer.Exit


@app.callback()
def inline(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Injective linear attention (InLine) for vision."""
    del version  # its callback has done the work


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the pictures and tables; made if missing.")
    ] = Path("out/demo"),
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens to measure, such as 64,256.", show_default="196,784,3136,12544"),
    ] = None,
    training: Annotated[
        bool, typer.Option("--train/--no-train", help="Train InLine and its twins on handwritten digits.")
    ] = True,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the digits.", show_default="as `inline recipes show digits`")
    ] = None,
) -> None:
    """Show on a CPU what InLine is, injective as softmax and cheap as linear attention, and train all three: 3 minutes.

    What an earlier demo left in the output folder is replaced.
    """
    token_counts = None if sizes is None else _parse_sizes(sizes)
    from inline_attention.cli.demo import run_demo

    run_demo(output, token_counts, training=training, epochs=epochs)


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Names to list, such as '*swin*'.", show_default=False)] = None,
    all_models: Annotated[bool, typer.Option("--all", help="List the softmax and linear twins too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models: parameters and multiply-adds as counted here, accuracy as published."""
    from inline_attention.cli.models import run_models

    run_models(pattern, with_twins=all_models, as_json=as_json)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="The file of weights, such as the authors' .pth.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model that the weights are of.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.", show_default=False)],
    use_ema: Annotated[
        bool | None,
        typer.Option("--use-ema/--no-ema", help="Demand averaged or raw weights.", show_default="averaged if there"),
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="Classes of the head in the file.", show_default="the model's 1000")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
) -> None:
    """Convert weights to safetensors. Nothing in the file is run."""
    from inline_attention.cli.convert import run_convert

    run_convert(file, output, model_name=model, use_ema=use_ema, num_classes=num_classes, force=force)


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="Pictures, and folders to search for them.", show_default=False)],
    checkpoint: Annotated[Path, typer.Option("--checkpoint", "-c", help="The file of weights.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="The model that the weights are of.", show_default="as the file says")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes or objects to print.")] = 5,
    least_score: Annotated[
        float, typer.Option(min=0, max=1, help="Of a detector: objects with less are left out.")
    ] = 0.5,
    size: Annotated[
        str | None,
        typer.Option(
            help="Pixels of the shorter side (1024), nothing being cropped, or height and width (800x1333).",
            show_default="the model's, with its crop",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the picture with what was found drawn on it here; of several, a folder of them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images to run at once.")] = 8,
) -> None:
    """Say what is in pictures: classes by a classifier, objects by a detector, classes of pixels by a segmenter."""
    image_size = None if size is None else _parse_image_size(size)
    from inline_attention.cli.predict import run_predict
    from inline_attention.cli.predictors import PredictOptions

    options = PredictOptions(model, top, image_size, least_score, device, batch_size)
    run_predict(images, checkpoint=checkpoint, options=options, save=save, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A recipe (`inline recipes`), or a YAML file of settings.", show_default=False)
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as key=value, such as optimizer.lr=1e-3; repeatable.")
    ] = None,
    list_flags: Annotated[bool, typer.Option("--flags", help="List timm's flags and what they set, and exit.")] = False,
) -> None:
    """Train a model: `inline train digits`, `inline train deit_tiny --data-dir IMAGENET -b 512`.

    Besides these options it takes timm's flags, of which --flags gives the whole list: --model, --data-dir, --dataset,
    --epochs, --updates, -b, --lr, --amp, --torchcompile, --workers, --output, --experiment, --resume, --device ...
    """
    from inline_attention.cli.train import flags_help, run_train

    if list_flags:
        say(flags_help())
        return
    run_train(recipe, settings or [], context.args)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A recipe (`inline recipes`), or a YAML file of settings.", show_default=False)
    ],
    axes: Annotated[
        list[str],
        typer.Option(
            "--axis",
            help="feature_map, normalization, local_residual, window, heads or attention, with values of your own as "
            "in heads=2,4; repeat for products.",
            show_default=False,
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every combination.")] = 3,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of runs and results; the same one goes on.")
    ] = Path("out/ablation"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as key=value, for all runs; repeatable.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Runs at a time, each a process; with several, speeds are not noted.")
    ] = 1,
) -> None:
    """Train a recipe with some things varied, over several seeds: `inline ablate digits --axis feature_map`.

    Takes the flags of `inline train` as well, for all runs: --model, --data-dir, --epochs, -b, --device and others.
    """
    from inline_attention.cli.ablate import run_ablate

    run_ablate(recipe, axes, seeds, output, settings or [], context.args, at_once)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders with runs in them.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, an HTML file.")] = Path(
        "report.html"
    ),
    ablation: Annotated[
        list[Path] | None, typer.Option(help="Result of `inline ablate`: its folder or JSON file; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Write one page with the argument for InLine, checked on your own runs: `inline report out/demo/digits_runs`.

    What is measured is kept beside the page, in report.measurements.json, and not measured again.
    """
    from inline_attention.cli.report import run_report

    run_report(runs, output, ablations=ablation or [], device=device)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", "-c", help="A file of weights, or a checkpoint.", show_default=False),
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Of a classifier: folder, digits, cifar10, hfds/NAME or wds/PATTERN.", show_default="folder"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split or subfolder.")] = "validation",
    repair: Annotated[
        bool, typer.Option("--repair", help="Of detectors and segmenters: repair faults of the data in what is used.")
    ] = False,
    allow_outside_files: Annotated[
        bool, typer.Option("--allow-outside-files", help="Read files that the data names outside of its folder.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="The model that the weights are of.", show_default="as the file says")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels.", show_default="the model's")] = None,
    use_ema: Annotated[bool, typer.Option("--use-ema", help="Take the averaged weights.")] = False,
    image_folder: Annotated[
        str | None,
        typer.Option(
            help="Of a segmenter: images below --data-dir, such as img/{split}.", show_default="by usual names"
        ),
    ] = None,
    map_folder: Annotated[
        str | None, typer.Option(help="Of a segmenter: maps of labels, likewise.", show_default="by usual names")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", "-b", min=1, help="Images to run at once.", show_default="64 of a classifier, else 4"
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "-j", min=0, help="Processes that read images, at most one to a core.")
    ] = 4,
    amp: Annotated[str, typer.Option(help="bf16, fp16 or off.")] = "off",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    results_file: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
) -> None:
    """Measure a checkpoint: top-1 and top-5 of a classifier, AP of a detector, mIoU of a segmenter."""
    from inline_attention.cli.evaluate import run_eval

    run_eval(
        checkpoint, results_file, data_dir=data_dir, dataset=dataset, split=split, repair=repair, model_name=model,
        allow_outside_files=allow_outside_files, size=size, use_ema=use_ema, image_folder=image_folder,
        map_folder=map_folder, batch_size=batch_size,
        workers=workers, amp=amp, device=device,
    )  # fmt: skip


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the recipes: name, the paper's result, command."""
    if context.invoked_subcommand is None:
        from inline_attention.cli.recipes import run_recipes_list

        run_recipes_list()


@recipes_app.command("show")
def recipes_show(name: Annotated[str, typer.Argument(help="Of the recipe.", show_default=False)]) -> None:
    """Print a recipe's settings as documented YAML."""
    from inline_attention.cli.recipes import run_recipes_show

    run_recipes_show(name)


@bench_app.command("attention")
def bench_attention(
    output: BenchmarkFolder = Path("out/bench"),
    device: BenchmarkDevice = "auto",
    dtype: BenchmarkDtype = None,
    tokens: Annotated[
        str | None, typer.Option(help="Values of N.", show_default="196,784,3136,16384,65536; on a CPU to 3136")
    ] = None,
    channels: Annotated[str | None, typer.Option(help="Values of C.", show_default="192,768; on a CPU 192")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Values of D.", show_default="32,64; on a CPU 32")] = None,
    elements: Annotated[
        int | None,
        typer.Option(min=1, help="B·N·C, from which the batch follows.", show_default="25 million; on a CPU 0.6"),
    ] = None,
    passes: Annotated[str, typer.Option(help="forward, forward+backward or both.")] = "forward,forward+backward",
    compiled: Annotated[
        str | None,
        typer.Option(
            help="Where to time torch.compile, which takes a while: none, first (of the C and D) or all.",
            show_default="first; on a CPU none",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few, small sizes.")] = False,
) -> None:
    """Time attention: softmax by PyTorch's kernels, and InLine by every backend that is here."""
    sizes = {
        "tokens": None if tokens is None else _parse_sizes(tokens, "--tokens"),
        "channels": None if channels is None else _parse_sizes(channels, "--channels"),
        "head_dims": None if head_dim is None else _parse_sizes(head_dim, "--head-dim"),
    }
    from inline_attention.cli.bench import run_bench_attention

    run_bench_attention(
        output, device=device, dtype=dtype, elements=elements, passes=_split(passes), compiled=compiled, quick=quick,
        **sizes,
    )  # fmt: skip


@bench_app.command("models")
def bench_models(
    output: BenchmarkFolder = Path("out/bench"),
    device: BenchmarkDevice = "auto",
    dtype: BenchmarkDtype = None,
    names: Annotated[str, typer.Option("--models", help="InLine models to time.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None,
        typer.Option(help="Sides of images in pixels.", show_default="224,512,1024,2048; on a CPU 224"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", min=1, help="Images.", show_default="the pixels of 256 at 224²; on a CPU 4"),
    ] = None,
    mode: Annotated[str, typer.Option(help="inference, training or both.")] = "inference",
    rivals: Annotated[
        str, typer.Option(help="timm (its softmax model), plain (InLine without kernels), softmax (our twin).")
    ] = "timm,plain,softmax",
    execution: Annotated[str, typer.Option(help="compiled, eager or both.")] = "compiled",
    compile_mode: Annotated[str, typer.Option(help="Mode of torch.compile.")] = "default",
    quick: Annotated[bool, typer.Option("--quick", help="224² only, measured briefly.")] = False,
) -> None:
    """Time whole models against their softmax rivals: images per second and peak memory."""
    image_sizes = None if sizes is None else _parse_sizes(sizes)
    from inline_attention.cli.bench import run_bench_models

    run_bench_models(
        output, device=device, dtype=dtype, names=_split(names), sizes=image_sizes, batch_size=batch_size,
        modes=_split(mode), rivals=_split(rivals), executions=_split(execution), compile_mode=compile_mode, quick=quick,
    )  # fmt: skip


@bench_app.command("everyday")
def bench_everyday(
    output: BenchmarkFolder = Path("out/bench"),
    only: Annotated[str, typer.Option(help="Measure cells whose section or name contains this.")] = "",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further cell is begun.")] = math.inf,
    processes: Annotated[int, typer.Option(min=0, help="Processes that compile ahead; 0 for none.")] = 12,
    add: Annotated[bool, typer.Option("--add", help="Keep cells already measured in the output folder.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny cells on a CPU, as a test.")] = False,
) -> None:
    """Time what users do every day on a GPU: training, converted ViTs, all head dims, masks, host time."""
    from inline_attention.cli.bench import run_bench_everyday

    run_bench_everyday(
        output, name="everyday", only=only, budget=budget, processes=processes, add=add, smoke=smoke
    )  # fmt: skip


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"expected whole numbers ≥ 1 separated by commas, such as 64,256, got {text!r}", param_hint=option
        )
    return sorted({int(part) for part in parts})


def _parse_image_size(text: str) -> int | tuple[int, int]:
    numbers = [int(part) for part in text.lower().split("x") if part.isdecimal() and int(part) > 0]
    if len(numbers) != text.lower().count("x") + 1 or len(numbers) > 2:
        raise typer.BadParameter(
            f"expected the shorter side, such as 1024, or height and width, such as 800x1333, got {text!r}",
            param_hint="--size",
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])

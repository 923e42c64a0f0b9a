"""The command `cfg-serve`: its subcommands and their options.

What they do is in the modules that they import when they run, so `--help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from cfg_core import __version__
from cfg_core.errors import ConfigError
from cfg_serve.errors import CommandError

app = typer.Typer(
    name="cfg-serve",
    help="Classifier-free guidance for the models that vLLM runs, served by Ray Serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""For a command whose options another parser reads, `--help` included."""

SERVER = "http://127.0.0.1:8000"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cfg-serve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


# --- options of `serve` ---------------------------------------------------------------------------

What = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|FILE.yaml",
        help="A model's folder or name on the hub, or a configuration. A model may be left out if"
        " --encoder names one.",
    ),
]
Port = Annotated[int | None, typer.Option(min=1, max=65535, envvar="PORT", help="Default: 8000.")]
Host = Annotated[
    str | None,
    typer.Option(
        envvar="HOST",
        help="Address to listen on. Default: 127.0.0.1, this machine only; 0.0.0.0 lets other"
        " machines in.",
    ),
]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="Tensor parallel size: GPUs, or processes on a CPU.")
]
Replicas = Annotated[int | None, typer.Option(min=1, help="Engines of the generator. Default: 1.")]
Encoders = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="A model for embeddings or reranking beside it; may be repeated."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="What clients send as `model`. Default: the last part of MODEL."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Context length. Default: the model's, or what memory allows."),
]
KVSplit = Annotated[
    Literal["elastic", "even"] | None,
    typer.Option(help="How leaders and followers share the KV cache. Default: elastic."),
]
Dtype = Annotated[
    str | None, typer.Option(help="Type to compute in, such as float32. Default: auto.")
]
HAProxy = Annotated[
    bool, typer.Option(envvar="HAPROXY", help="HAProxy in place of Serve's own proxy.")
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the YAML that would be served, and end.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything that can be known before Ray starts.")
]


@app.command()
def serve(
    what: What = None,
    port: Port = None,
    host: Host = None,
    tp: TensorParallel = 1,
    replicas: Replicas = None,
    encoder: Encoders = None,
    name: Name = None,
    max_model_len: MaxModelLen = None,
    kv_split: KVSplit = None,
    dtype: Dtype = None,
    haproxy: HAProxy = False,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
) -> None:
    """Serve a model, or a YAML file, until Ctrl-C.

    For a model, values are chosen that suit it and this machine. --print-config shows them.
    """
    from cfg_serve.plan import plan_for
    from cfg_serve.start import server

    of_a_model = {"name": name, "max_model_len": max_model_len, "dtype": dtype}
    plan = plan_for(what, host, port, replicas, encoder, tp, kv_split, **of_a_model)
    if print_config:
        print(yaml.safe_dump(plan.config, sort_keys=False), end="")
        return
    plan = server.Plan(plan.name, plan.config, haproxy)
    if dry_run:
        server.check(plan, with_ray=True)
        print(f"{plan.name}: can be served on {plan.url}")
        return
    raise typer.Exit(server.run(plan))


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files.")],
    ray: Annotated[
        bool, typer.Option(help="Let Ray check the values of its own options (a second).")
    ] = True,
) -> None:
    """Check the whole of a YAML file: keys, values, names, and that models are there."""
    from cfg_serve.check.command import report

    raise typer.Exit(report(files, with_ray=ray))


@app.command()
def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to look at.")] = 8000,
    engine: Annotated[
        bool, typer.Option(help="Let a tiny engine sample one guided token (half a minute).")
    ] = True,
) -> None:
    """Say what of this machine and this installation is wrong, and what to do."""
    from cfg_serve.doctor.command import report

    raise typer.Exit(report(port, with_engine=engine))


@app.command(context_settings=PASSED_ON)
def embed(context: typer.Context) -> None:
    """Compute a vector for each line of a file: embed MODEL INPUT OUTPUT."""
    from cfg_core.prefill_only.__main__ import main as embed_main

    raise typer.Exit(embed_main(["embed", *context.args], prog="cfg-serve"))


@app.command()
def bench() -> None:
    """Run the short set of benchmarks. Only from a checkout, which has them."""
    from cfg_serve.bench import run

    raise typer.Exit(run())


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = SERVER,
    model: Annotated[str | None, typer.Option(help="Default: the server's first one.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    scale: Annotated[list[float] | None, typer.Option(help="Repeat it: side by side.")] = None,
    negative: Annotated[str, typer.Option(help="The negative system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 300,
    key: Annotated[str | None, typer.Option(envvar="CFG_SERVE_KEY", help="API key.")] = None,
) -> None:
    """Chat with a server in the terminal: /scale, /negative, and answers side by side."""
    from cfg_serve.chat.session import Session
    from cfg_serve.chat.terminal import run

    session = Session(
        model=model or "",
        system=system,
        negative=negative,
        scales=tuple(scale or (1.5,)),
        max_tokens=max_tokens,
    )
    raise typer.Exit(run(url, session, key))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status, which is 0 only if all is well.

    A mistake of the user becomes one sentence on standard error, never a traceback.
    """
    try:
        status = app(arguments, prog_name="cfg-serve", standalone_mode=False)
    except (CommandError, ConfigError) as error:
        print(f"cfg-serve: {error}", file=sys.stderr)
        return 1
    except typer.Abort:
        print("cfg-serve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads what is printed any more: `| head`
        sys.stdout = None
        return 0
    except Exception as error:
        if not hasattr(error, "show"):  # an error of click's about the command line
            raise
        error.show()
        return int(getattr(error, "exit_code", 2))
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())

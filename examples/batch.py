"""Offline batch with guidance, which can be killed and goes on where it was.

    python examples/batch.py examples/batch_requests.jsonl answers.jsonl

Input and output are OpenAI's batch format. Bodies have a prompt or messages, fields of vLLM's
SamplingParams, and guidance fields. An answer is written when it is there, in one piece. The same
command, run again, answers only what has no line yet. What cannot be answered gets a line, too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: a kill leaves nothing
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault(
    "TORCHDYNAMO_DISABLE", "1"
)  # goes with enforce_eager: leave both out on a GPU

from tqdm import tqdm
from transformers import AutoTokenizer
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from cfg_core.vllm_plugin import guided_engine_args

Json: TypeAlias = dict[str, Any]
MODEL = str(Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct")
ENGINE = {"max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 29}
AT_ONCE = 256  # requests in the engine; the rest of the file waits outside


class Answers:
    """The output file. A lock keeps two runs apart. Each line is appended with one system call."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{path} is being written by another run.")
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole + newline))  # a kill may have torn the last line
        self.done = {json.loads(line)["custom_id"] for line in whole.splitlines()}

    def add(self, custom_id: str, response: Json | None, error: str | None = None) -> None:
        line: Json = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        line |= {"response": response, "error": error and {"code": "failed", "message": error}}
        self._file.write(json.dumps(line).encode() + b"\n")


def requests(path: Path) -> Iterator[tuple[str, Json | str]]:
    """For each line its id, or "line-7" if it has none of its own; its body, or what is wrong."""
    seen: set[str] = set()
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            name, body = line["custom_id"], line["body"]
            if not isinstance(name, str) or not isinstance(body, dict) or name in seen:
                raise TypeError("custom_id must be a string of this line alone, body an object")
        except (ValueError, KeyError, TypeError) as error:
            name, body = f"line-{number}", f"not a line of a batch: {error!r}"
        seen.add(name)
        yield name, body


def parse(body: Json, tokenizer: Any) -> tuple[Any, SamplingParams]:
    """What the engine takes. As on the server, `negative_prompt` of a conversation is the system
    message of the negative one."""
    ours = ("guid", "negative", "cfg")
    guidance = {name: value for name, value in body.items() if name.startswith(ours)}
    sampling = {name: body[name] for name in body if name not in {"model", *guidance}}

    def ids(x: list[Json]) -> Any:
        return tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False)

    if messages := sampling.pop("messages", None):
        prompt: Any = {"prompt_token_ids": ids(messages)}
        sampling["max_tokens"] = sampling.pop("max_completion_tokens", sampling.get("max_tokens"))
        if "negative_prompt" in guidance and "negative_messages" not in guidance:
            system = {"role": "system", "content": guidance.pop("negative_prompt")}
            others = [message for message in messages if message["role"] != "system"]
            guidance["negative_messages"] = [system, *others]
        if "negative_messages" in guidance:
            guidance["negative_prompt_token_ids"] = ids(guidance.pop("negative_messages"))
    else:
        text = sampling.pop("prompt")
        prompt = text if isinstance(text, str) else {"prompt_token_ids": text}
    sampling["output_kind"] = RequestOutputKind.FINAL_ONLY
    return prompt, SamplingParams(**sampling, extra_args=guidance)


def answer(output: RequestOutput, model: str, is_chat: bool) -> Json:
    choices: list[Json] = []
    for one in output.outputs:
        message = {"role": "assistant", "content": one.text}
        text = {"message": message} if is_chat else {"text": one.text}
        choices.append({"index": one.index, "finish_reason": one.finish_reason} | text)
    body: Json = {"id": output.request_id, "model": model, "created": int(time.time())}
    body |= {"object": "chat.completion" if is_chat else "text_completion", "choices": choices}
    read, made = len(output.prompt_token_ids or []), sum(len(x.token_ids) for x in output.outputs)
    body["usage"] = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return {"status_code": 200, "request_id": output.request_id, "body": body}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a batch file with guidance, offline.")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--engine", type=json.loads, default=ENGINE, help="vLLM's arguments, JSON")
    args = parser.parse_args()
    answers, lines = Answers(args.output), list(requests(args.input))
    waiting = [line for line in reversed(lines) if line[0] not in answers.done]
    progress = tqdm(total=len(lines), initial=len(lines) - len(waiting), unit="request")
    if not waiting:
        return
    engine = EngineArgs(model=args.model, **guided_engine_args(), **args.engine)
    vllm, tokenizer = LLMEngine.from_engine_args(engine), AutoTokenizer.from_pretrained(args.model)
    is_chat: dict[str, bool] = {}  # of the requests in the engine
    while waiting or is_chat:
        while waiting and len(is_chat) < AT_ONCE:
            name, body = waiting.pop()
            try:
                if isinstance(body, str):
                    raise ValueError(body)
                vllm.add_request(name, *parse(body, tokenizer))
                is_chat[name] = "messages" in body
            except Exception as error:  # of this line alone: the engine has not taken it
                answers.add(name, None, f"{type(error).__name__}: {error}")
                progress.update()
        for output in vllm.step():
            name = output.request_id
            given_up = any(x.finish_reason in ("error", "abort") for x in output.outputs)
            result = answer(output, args.model, is_chat.pop(name))
            answers.add(name, *((None, "the engine gave it up") if given_up else (result, None)))
            progress.update()


if __name__ == "__main__":
    main()

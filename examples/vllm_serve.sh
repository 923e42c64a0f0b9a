#!/usr/bin/env bash
# vLLM's own server with the plugin, and a guided request through `vllm_xargs`.
#
#     examples/vllm_serve.sh            # serves on port 8001, asks twice, and stops
#
# MODEL, PORT and PYTHON name others. With vLLM's CUDA build,
# `vllm serve "$MODEL" $flags` does the same, and the flags for CPUs below are not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
PORT=${PORT:-8001}
export TORCHDYNAMO_DISABLE=1 VLLM_LOGGING_LEVEL=ERROR

flags=$("$PYTHON" -m cfg_core.vllm_plugin)  # --scheduler-cls, --worker-cls, --additional-config
# shellcheck disable=SC2086  # each flag is a word
"$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name model $flags \
    --host 127.0.0.1 --port "$PORT" --max-model-len 512 --enforce-eager \
    --kv-cache-memory-bytes 100000000 >&2 &
server=$!
trap 'kill $server; wait $server || true' EXIT

until curl -sf "http://127.0.0.1:$PORT/health"; do
    kill -0 $server  # ends the script if the server has died
    sleep 1
done

# Guidance fields go into vllm_xargs. The negative is a text, or token ids: this server does not
# render negative conversations.
ask() {
    curl -sf "http://127.0.0.1:$PORT/v1/completions" -H 'Content-Type: application/json' -d "{
        \"model\": \"model\", \"prompt\": \"Once upon a time, a dragon\", \"max_tokens\": 30,
        \"temperature\": 0, \"vllm_xargs\": $1}"
    echo
}
ask '{}'
ask '{"guidance_scale": 2, "negative_prompt": "Once upon a time, a farmer"}'

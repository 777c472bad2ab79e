#!/bin/sh
# Starts Triton with its OpenAI frontend on port 9000. It takes text; images go to Triton's own ports.
set -eu
tokenizer=$(python3 -c 'from fovea.engine.load import resolve; print(resolve("fovea-tiny", ""))')
cd "${OPENAI_FRONTEND:-/opt/tritonserver/python/openai}"
# Only fovea_generate has the inputs that the frontend sends. Without --backend vllm, it would send those of
# TensorRT-LLM.
exec python3 openai_frontend/main.py \
  --model-repository "${MODEL_REPOSITORY:-/models}" \
  --model-control-mode explicit --load-model fovea_generate \
  --backend vllm \
  --tokenizer "$tokenizer" \
  --default-max-tokens 512 \
  --http-max-input-size 67108864 \
  --openai-port "${OPENAI_PORT:-9000}" \
  --enable-kserve-frontends \
  "$@"

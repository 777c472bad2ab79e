#!/bin/sh
# Starts Fovea in a container of Vertex AI, which sets the variables AIP_*.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)

fail() {
  echo "entrypoint: $1" >&2
  exit 1
}

case "${AIP_PREDICT_ROUTE:-/v1/predict}" in
  /v1/predict | /invocations) ;;
  *) fail "AIP_PREDICT_ROUTE is $AIP_PREDICT_ROUTE; accepted: /v1/predict, /invocations" ;;
esac
case "${AIP_HEALTH_ROUTE:-/ready}" in
  /ready | /ping) ;;
  # /health is 200 while the model loads, so Vertex AI would send requests too early.
  *) fail "AIP_HEALTH_ROUTE is $AIP_HEALTH_ROUTE; accepted: /ready, /ping" ;;
esac

model=${FOVEA_MODEL:-Qwen/Qwen3-VL-4B-Instruct}
if [ -n "${AIP_STORAGE_URI:-}" ]; then
  model=${MODEL_FOLDER:-/tmp/model}
  python3 "$here/fetch_model.py" "$AIP_STORAGE_URI" "$model"
fi
# exec: the server itself gets SIGTERM, and finishes the running requests.
exec fovea serve "$model" --config "$here/fovea.toml" --host 0.0.0.0 --port "${AIP_HTTP_PORT:-8080}"

#!/bin/sh
# Starts Fovea in a container of SageMaker, which runs the image with the argument "serve".
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)

fail() {
  echo "entrypoint: $1" >&2
  exit 1
}

[ "${1:-}" = serve ] || fail "the argument is '${1:-}'; accepted: serve"
data=${SM_MODEL_DIR:-/opt/ml/model}
model=${FOVEA_MODEL:-fovea-tiny}
if [ -f "$data/config.json" ]; then
  model=$data
elif [ -n "$(ls -A "$data" 2>/dev/null)" ]; then
  fail "$data has no config.json; the model's archive has its files at the top, not in a folder"
fi
# exec: the server itself gets SIGTERM, and finishes the running requests.
exec fovea serve "$model" --config "$here/fovea.toml" --host 0.0.0.0 \
  --port "${SAGEMAKER_BIND_TO_PORT:-8080}"

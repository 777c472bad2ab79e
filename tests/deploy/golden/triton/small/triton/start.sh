#!/bin/sh
# Starts Triton: HTTP on 8000, gRPC on 8001, metrics on 8002. Arguments are passed on to Triton.
set -eu
exec tritonserver \
  --model-repository="${MODEL_REPOSITORY:-/models}" \
  --exit-on-error=true \
  --exit-timeout-secs=60 \
  --metrics-config=summary_latencies=true \
  "$@"

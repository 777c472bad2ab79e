#!/bin/sh
# Creates or updates the endpoint. IMAGE is in ECR; MODEL_DATA is the s3:// address of a tar.gz, or left out.
#
#   deploy.sh IMAGE [MODEL_DATA]
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
image=${1:?usage: deploy.sh IMAGE [MODEL_DATA]}
aws cloudformation deploy --stack-name fovea \
  --template-file "$here/endpoint.json" \
  --parameter-overrides "Image=$image" "ModelData=${2:-}" "Role=${ROLE:?set ROLE to the ARN of the execution role}"

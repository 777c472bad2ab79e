#!/bin/sh
# Uploads the image as a model of Vertex AI, and deploys it on an endpoint.
#
#   deploy.sh IMAGE                 the first model: a new endpoint, which gets all traffic
#   deploy.sh IMAGE ENDPOINT SHARE  a second model on an endpoint, with SHARE percent of its traffic
#
# IMAGE is in Artifact Registry. With ARTIFACTS=gs://BUCKET/FOLDER, the model's files come from there.
set -eu
project=my-project
region=us-central1
name=fovea
image=${1:?usage: deploy.sh IMAGE [ENDPOINT SHARE]}
endpoint=${2:-}
share=${3:-100}

# The token goes through a pipe: arguments are visible to other users of the machine.
authorization() {
  printf 'Authorization: Bearer %s\n' "$(gcloud auth print-access-token)"
}

set -- ai models upload --project="$project" --region="$region" --display-name="$name" \
  --container-image-uri="$image" \
  --container-ports=8080 \
  --container-predict-route=/v1/predict \
  --container-health-route=/ready \
  --container-deployment-timeout-seconds=1800 \
  --format='value(model)'
if [ -n "${ARTIFACTS:-}" ]; then
  set -- "$@" --artifact-uri="$ARTIFACTS"
fi
model=$(gcloud "$@")

split=0=100
if [ -z "$endpoint" ]; then
  # A dedicated endpoint takes 10 MB, streams, and waits longer than a minute. Only the API creates one.
  endpoints="https://$region-aiplatform.googleapis.com/v1/projects/$project/locations/$region/endpoints"
  answer=$(authorization | curl --fail --silent --show-error --request POST "$endpoints" \
    --header @- --header "Content-Type: application/json" \
    --data "{\"displayName\": \"$name\", \"dedicatedEndpointEnabled\": true,
      \"clientConnectionConfig\": {\"inferenceTimeout\": \"600s\"}}")
  endpoint=$(printf '%s' "$answer" | sed -n 's#.*"name": *".*/endpoints/\([0-9]*\)/operations/.*#\1#p')
  authorization | curl --fail --silent --show-error --output /dev/null --header @- \
    --retry 30 --retry-delay 2 --retry-all-errors "$endpoints/$endpoint"
elif [ "$share" -lt 100 ]; then
  # 0 is the model that is deployed now. The rest goes on to the model that has traffic already.
  current=$(gcloud ai endpoints describe "$endpoint" --project="$project" --region="$region" \
    --format='value(deployedModels[0].id)')
  split=0=$share,$current=$((100 - share))
fi

gcloud ai endpoints deploy-model "$endpoint" --project="$project" --region="$region" \
  --model="${model##*/}" --display-name="$name" \
  --machine-type=n2-standard-4 \
  --min-replica-count=1 \
  --max-replica-count=1 \
  --traffic-split="$split"
echo "model $model on endpoint $endpoint, traffic $split"

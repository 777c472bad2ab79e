#!/bin/sh
# Starts the server and the page, and ends when one of them ends, so that the Space shows that it is broken.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
export FOVEA_PORT="${FOVEA_PORT:-8000}"

fovea serve "${FOVEA_MODEL:-fovea-tiny}" --config "$here/fovea.toml" \
  --host 127.0.0.1 --port "$FOVEA_PORT" &
server=$!
python3 "$here/app.py" &
page=$!

end() {
  kill "$server" "$page" 2>/dev/null || true
  wait
  exit "$1"
}
trap 'end 0' TERM INT
while kill -0 "$server" 2>/dev/null && kill -0 "$page" 2>/dev/null; do
  sleep 1 &
  wait $!
done
end 1

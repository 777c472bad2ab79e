#!/bin/sh
# Runs the deployment vlm on this machine, until SIGINT, SIGTERM or SIGHUP.
#
#   ./run.sh          # with NGINX as the proxy
#   ./run.sh envoy    # with Envoy
#
# PYTHON    Python that has Fovea; default: python3
# READY_S   seconds in which everything must be ready; default: 600
#
# A service that ends by itself is started again after a second. state/log has the output of each service,
# state/run its process id in NAME.pid. state/run/ready exists while all have been ready once.
set -eu
cd "$(dirname "$0")"
PATH="$PATH:/usr/sbin:/sbin"
export PATH
PYTHON=${PYTHON:-python3}
READY_S=${READY_S:-600}
proxy=${1:-nginx}
case $proxy in
    nginx | envoy) ;;
    *)
        echo "run.sh: the proxy is '$proxy'; accepted: nginx, envoy" >&2
        exit 2
        ;;
esac
# With a session of its own, a service does not get the Ctrl-C of the terminal: the services are stopped in order.
session=$(command -v setsid || true)

# supervise NAME COMMAND...: runs a command again whenever it ends, until state/run/NAME.stop exists.
supervise() {
    name=$1
    shift
    trap : HUP INT TERM
    while [ ! -e "state/run/$name.stop" ]; do
        ${session:+"$session"} "$@" >>"state/log/$name.log" 2>&1 &
        child=$!
        echo "$child" >"state/run/$name.pid"
        while kill -0 "$child" 2>/dev/null; do
            wait "$child" || true
        done
        rm -f "state/run/$name.pid"
        if [ ! -e "state/run/$name.stop" ]; then
            echo "$name has ended, and is started again" >&2
            sleep 1
        fi
    done
    : >"state/run/$name.ended"
}

# start NAME COMMAND...: starts a service.
start() {
    supervise "$@" &
    started="$started $1"
}

# send SIGNAL NAME: sends a signal to a service if it runs.
send() {
    if pid=$(cat "state/run/$2.pid" 2>/dev/null); then
        kill -s "$1" "$pid" 2>/dev/null || true
    fi
}

# stop GRACE_S SIGNAL NAME...: stops services together, and kills those that take longer than GRACE_S.
stop() {
    ticks=$(($1 * 5))
    signal=$2
    shift 2
    for name in "$@"; do
        : >"state/run/$name.stop"
        send "$signal" "$name"
    done
    for name in "$@"; do
        case " $started " in *" $name "*) ;; *) continue ;; esac
        while [ ! -e "state/run/$name.ended" ]; do
            if [ "$ticks" -le 0 ]; then
                send KILL "$name"
            fi
            ticks=$((ticks - 1))
            sleep 0.2
        done
    done
}

# stop_all STATUS: stops everything, from the clients' side to the data, and exits. A second signal kills.
stop_all() {
    trap kill_all HUP INT TERM
    rm -f state/run/ready
    echo "stopping" >&2
    stop 70 QUIT nginx # it finishes the running requests
    stop 75 TERM gateway-0 gateway-1
    stop 75 TERM engine-qwen-0 engine-qwen-1 engine-qwen-spot-0 engine-qwen-spot-1 engine-qwen-spot-2 engine-qwen-spot-3 engine-tiny-0 engine-tiny-1
    stop 10 TERM envoy redis prometheus alertmanager
    exit "$1"
}

kill_all() {
    for name in $started; do
        : >"state/run/$name.stop"
        send KILL "$name"
    done
    exit 130
}

started=""
trap 'stop_all 0' HUP INT TERM
mkdir -p state/log state/redis state/prometheus state/alertmanager
rm -rf state/run
mkdir state/run

start redis redis-server redis.conf
start engine-qwen-0 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-0.toml
start engine-qwen-1 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-1.toml
start engine-qwen-spot-0 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-spot-0.toml
start engine-qwen-spot-1 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-spot-1.toml
start engine-qwen-spot-2 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-spot-2.toml
start engine-qwen-spot-3 "$PYTHON" -m fovea.cli.main serve --config engine-qwen-spot-3.toml
start engine-tiny-0 "$PYTHON" -m fovea.cli.main serve --config engine-tiny-0.toml
start engine-tiny-1 "$PYTHON" -m fovea.cli.main serve --config engine-tiny-1.toml
start gateway-0 "$PYTHON" -m fovea.cli.main gateway --config gateway-0.toml
start gateway-1 "$PYTHON" -m fovea.cli.main gateway --config gateway-1.toml
start prometheus prometheus --config.file=prometheus/prometheus.yml --storage.tsdb.path=state/prometheus \
    --storage.tsdb.retention.time=31d --enable-feature=exemplar-storage \
    --web.listen-address=127.0.0.1:8181
start alertmanager "$(command -v alertmanager || echo prometheus-alertmanager)" --config.file=alertmanager/alertmanager.yml \
    --storage.path=state/alertmanager --cluster.listen-address= --web.listen-address=127.0.0.1:8182
if [ "$proxy" = envoy ]; then
    start envoy envoy --config-path envoy.yaml --use-dynamic-base-id --log-level warning
else
    user=""
    if [ "$(id -u)" -eq 0 ]; then
        user="user root;" # without it, NGINX would give up root and could not open this folder
    fi
    start nginx nginx -p "$PWD" -c "$PWD/nginx.conf" -g "daemon off; pid state/run/nginx.master; $user"
fi

"$PYTHON" -c '
import ssl, sys, time, urllib.request
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
opener, end = urllib.request.build_opener(*handlers), time.monotonic() + float(sys.argv[1])
for url in sys.argv[2:]:
    while True:
        try:
            opener.open(url, timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"{url} is not ready: {error}")
            time.sleep(0.1)
' "$READY_S" \
    http://127.0.0.1:8000/ready \
    http://127.0.0.1:8001/ready \
    http://127.0.0.1:8002/ready \
    http://127.0.0.1:8003/ready \
    http://127.0.0.1:8004/ready \
    http://127.0.0.1:8005/ready \
    http://127.0.0.1:8006/ready \
    http://127.0.0.1:8007/ready \
    http://127.0.0.1:8080/ready \
    http://127.0.0.1:8081/ready \
    http://127.0.0.1:80/ready &
wait $! || stop_all 1
: >state/run/ready
echo "ready: http://127.0.0.1:80/v1" >&2
while :; do
    sleep 3600 &
    wait $! || true
done

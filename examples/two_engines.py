"""Start two engines with the bundled model, on ports 8001 and 8002, until Ctrl-C.

python examples/two_engines.py
fovea gateway --config examples/gateway.toml
"""

from __future__ import annotations

import signal
import subprocess
import sys

PORTS = (8001, 8002)


def main() -> None:
    fovea = [sys.executable, "-m", "fovea.cli.main", "serve", "--log-level", "warning"]
    engines = [subprocess.Popen([*fovea, "--port", str(port), *sys.argv[1:]]) for port in PORTS]
    print(f"engines on ports {' and '.join(map(str, PORTS))}; Ctrl-C ends them")
    try:
        for engine in engines:
            engine.wait()
    except KeyboardInterrupt:
        for engine in engines:
            engine.send_signal(signal.SIGTERM)
        for engine in engines:
            engine.wait()


if __name__ == "__main__":
    main()

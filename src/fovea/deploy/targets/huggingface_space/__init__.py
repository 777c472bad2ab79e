"""Hugging Face Space: an image with Fovea's server and a page of Gradio in front of it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.docker import PARSE, server_config

FOLDER = "space"
GRADIO = "6.31.0"
HARDWARE = {"T4": "t4-small", "L4": "l4x1", "A10": "a10g-small", "A100-80GB": "a100-large"}
"""Hardware of a Space by GPU. With another GPU, the README suggests none."""
BASIC_CPUS = 2


def render(spec: DeploySpec) -> Files:
    """Return the files of a Space for the first pool."""
    pool = spec.pools[0]
    comment = "Settings of `fovea serve` in the Space. start.sh sets model, host and port."
    return {
        f"{FOLDER}/README.md": _readme(spec, pool),
        f"{FOLDER}/Dockerfile": _dockerfile(),
        f"{FOLDER}/requirements.txt": f"gradio=={GRADIO}\n",
        f"{FOLDER}/app.py": _app(),
        f"{FOLDER}/start.sh": _start(pool),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the script, the image, the page and the front matter."""
    matter = "fovea.deploy.targets.huggingface_space.front_matter"
    return (
        Check("shellcheck", (f"{{dir}}/{FOLDER}/start.sh",), "script of the Space"),
        Check("hadolint", (f"{{dir}}/{FOLDER}/Dockerfile",), "image of the Space"),
        Check("python3", ("-c", PARSE, f"{{dir}}/{FOLDER}/app.py"), "syntax of the page"),
        Check("python3", ("-m", matter, f"{{dir}}/{FOLDER}/README.md"), "front matter of the Space"),
    )


@cache
def _app() -> str:
    return files(__package__).joinpath("app.py").read_text(encoding="utf-8")


def _readme(spec: DeploySpec, pool: Pool) -> str:
    if pool.hardware == "cpu":
        hardware = "cpu-basic" if pool.cpus <= BASIC_CPUS else "cpu-upgrade"
    else:
        hardware = HARDWARE.get(pool.gpu, "")
    suggested = f"suggested_hardware: {hardware}\n" if hardware else ""
    return f"""\
---
title: {spec.name}
emoji: 👁️
colorFrom: indigo
colorTo: blue
sdk: docker
app_port: 7860
{suggested}startup_duration_timeout: 1h
short_description: Ask a vision-language model about a picture
pinned: false
---

# {spec.name}

Upload a picture and ask a question. The page shows the answer, which parts of the picture mattered, and the
figures of the answer. The model is {pool.client_model}, served by Fovea. The page is also an API, with the
endpoint `/predict`.
"""


def _dockerfile() -> str:
    return """\
# A Space runs its image as user 1000. Fovea's wheel lies beside this file: a Space builds from its own files.
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 user
USER 1000
ENV HOME=/home/user PATH=/home/user/.local/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/user/app
COPY --chown=1000 requirements.txt fovea_vlm-*.whl ./
RUN pip install --no-cache-dir -r requirements.txt ./fovea_vlm-*.whl
COPY --chown=1000 app.py fovea.toml start.sh ./
EXPOSE 7860
CMD ["sh", "start.sh"]
"""


def _start(pool: Pool) -> str:
    return f"""\
#!/bin/sh
# Starts the server and the page, and ends when one of them ends, so that the Space shows that it is broken.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
export FOVEA_PORT="${{FOVEA_PORT:-8000}}"

fovea serve "${{FOVEA_MODEL:-{pool.model}}}" --config "$here/fovea.toml" \\
  --host 127.0.0.1 --port "$FOVEA_PORT" &
server=$!
python3 "$here/app.py" &
page=$!

end() {{
  kill "$server" "$page" 2>/dev/null || true
  wait
  exit "$1"
}}
trap 'end 0' TERM INT
while kill -0 "$server" 2>/dev/null && kill -0 "$page" 2>/dev/null; do
  sleep 1 &
  wait $!
done
end 1
"""

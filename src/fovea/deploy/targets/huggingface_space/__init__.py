"""Hugging Face Space: an image with Fovea's server and a page of Gradio in front of it."""

from __future__ import annotations

from fovea.deploy.formats import fill_template, plain_file
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
        f"{FOLDER}/README.md": fill_template(
            "huggingface_space/README.md.j2", spec=spec, pool=pool, hardware=_hardware(pool)
        ),
        f"{FOLDER}/Dockerfile": plain_file("huggingface_space/Dockerfile"),
        f"{FOLDER}/requirements.txt": f"gradio=={GRADIO}\n",
        f"{FOLDER}/app.py": plain_file("huggingface_space/app.py"),
        f"{FOLDER}/start.sh": fill_template("huggingface_space/start.sh.j2", pool=pool),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the script, the image and the page."""
    return (
        Check("shellcheck", (f"{{dir}}/{FOLDER}/start.sh",), "script of the Space"),
        Check("hadolint", (f"{{dir}}/{FOLDER}/Dockerfile",), "image of the Space"),
        Check("python3", ("-c", PARSE, f"{{dir}}/{FOLDER}/app.py"), "syntax of the page"),
    )


def _hardware(pool: Pool) -> str:
    """Return the hardware of the Space that the README suggests; "": none."""
    if pool.hardware == "cpu":
        return "cpu-basic" if pool.cpus <= BASIC_CPUS else "cpu-upgrade"
    return HARDWARE.get(pool.gpu, "")

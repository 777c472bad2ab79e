"""Triton: a model repository, an image that serves it, and Triton's OpenAI frontend.

The repository has three models: `fovea_generate` runs the whole engine, `fovea_preprocess` turns an image
into pixels, and `fovea_ensemble` is both in a row. The engine is one model, not a vision encoder and a
language model, so that the encoder's output stays in one process and its caches.
"""

from __future__ import annotations

import json
from typing import Any

from fovea.core.settings import settings_of
from fovea.deploy.formats import fill_template, plain_file
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.docker import PARSE
from fovea.engine.config import EngineConfig
from fovea.media.limits import MediaLimits

TRITON = "nvcr.io/nvidia/tritonserver:26.07-py3"
FOLDER, GENERATE, PREPROCESS, ENSEMBLE = "triton", "fovea_generate", "fovea_preprocess", "fovea_ensemble"
MOST_DECODERS = 4
"""Processes of `fovea_preprocess` at most; each has decoders of its own."""


def render(spec: DeploySpec) -> Files:
    """Return the files for the first pool."""
    pool = spec.pools[0]
    models = f"{FOLDER}/models"
    settings = _settings(spec, pool)
    on_gpu = "kind: KIND_GPU count: 1 gpus: [ 0 ]"
    return {
        f"{FOLDER}/Dockerfile": fill_template("triton/Dockerfile.j2", image=TRITON),
        f"{FOLDER}/start.sh": fill_template("triton/start.sh.j2", spec=spec),
        f"{FOLDER}/openai.sh": fill_template(
            "triton/openai.sh.j2", pool=pool, model=GENERATE, limit=spec.max_body_mib << 20
        ),
        f"{models}/{GENERATE}/config.pbtxt": fill_template(
            "triton/generate.pbtxt.j2",
            instances=on_gpu if pool.hardware == "cuda" else "kind: KIND_CPU count: 1",
            settings=_text(settings),
        ),
        f"{models}/{GENERATE}/1/model.py": plain_file("triton/generate_model.py"),
        f"{models}/{PREPROCESS}/config.pbtxt": fill_template(
            "triton/preprocess.pbtxt.j2",
            processes=min(MOST_DECODERS, pool.cpus),
            settings=_text({"media": settings["media"]}),
        ),
        f"{models}/{PREPROCESS}/1/model.py": plain_file("triton/preprocess_model.py"),
        f"{models}/{ENSEMBLE}/config.pbtxt": plain_file("triton/ensemble.pbtxt"),
        f"{models}/{ENSEMBLE}/1/README": "Triton wants a folder of a version; an ensemble has no files.\n",
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of scripts, image and Python. Triton checks the repository when it loads it."""
    models = ("generate", "preprocess")
    return (
        Check("shellcheck", ("{dir}/triton/start.sh", "{dir}/triton/openai.sh"), "scripts of Triton"),
        Check("hadolint", ("{dir}/triton/Dockerfile",), "image of Triton"),
        *(
            Check(
                "python3",
                ("-c", PARSE, f"{{dir}}/triton/models/fovea_{name}/1/model.py"),
                f"syntax of the model fovea_{name}",
            )
            for name in models
        ),
    )  # fmt: skip


def _text(settings: dict[str, Any]) -> str:
    """Return settings as a text of a configuration, from which `model.py` reads them."""
    return json.dumps(json.dumps(settings, sort_keys=True))


def _names(cls: type[Any]) -> frozenset[str]:
    return frozenset(entry.name for entry in settings_of(cls))


def _settings(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the settings that the models read: of the engine, and of media.

    Those of the HTTP server, such as port, keys and queues of bodies, have no meaning here: Triton is the
    server.
    """
    values = spec.engine_settings(pool)
    engine, media = _names(EngineConfig), _names(MediaLimits)
    return {
        "model": values["model"],
        "engine": {name: value for name, value in values.items() if name in engine},
        "media": {name: value for name, value in values.items() if name in media},
        "timeout_s": values["request_timeout"],
    }

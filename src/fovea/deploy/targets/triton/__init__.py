"""Triton: a model repository, an image that serves it, and Triton's OpenAI frontend.

The repository has three models: `fovea_generate` runs the whole engine, `fovea_preprocess` turns an image
into pixels, and `fovea_ensemble` is both in a row. The engine is one model, not a vision encoder and a
language model, so that the encoder's output stays in one process and its caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fovea.core.settings import settings_of
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.docker import PARSE
from fovea.engine.config import EngineConfig
from fovea.media.limits import MediaLimits


class Tensor(NamedTuple):
    """An input or output of a model.

    kind: Triton's type without TYPE_. dims: sizes; -1: any.
    """

    name: str
    kind: str
    dims: tuple[int, ...]
    optional: bool = False


class Step(NamedTuple):
    """One model of an ensemble. inputs, outputs: tensors of the ensemble by those of the model."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def tensors(field: str, entries: Sequence[Tensor]) -> str:
    """Return the field `input` or `output`."""
    texts = []
    for each in entries:
        dims = ", ".join(map(str, each.dims))
        optional = "\n    optional: true" if each.optional else ""
        head = f'  {{\n    name: "{each.name}"\n    data_type: TYPE_{each.kind}\n'
        texts.append(f"{head}    dims: [ {dims} ]{optional}\n  }}")
    return f"{field} [\n" + ",\n".join(texts) + "\n]\n"


def python_model_config(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    decoupled: bool,
    instances: str,
    settings: Mapping[str, Any],
) -> str:
    """Return the configuration of a Python model.

    instances: the body of instance_group. settings: the value of the parameter `fovea`, which `model.py`
        reads.
    """
    value = json.dumps(json.dumps(settings, sort_keys=True))
    return f"""\
name: "{name}"
backend: "python"
max_batch_size: 0

model_transaction_policy {{
  decoupled: {str(decoupled).lower()}
}}

{tensors("input", inputs)}
{tensors("output", outputs)}
instance_group [ {{ {instances} }} ]

parameters {{
  key: "fovea"
  value: {{ string_value: {value} }}
}}
"""


def ensemble_config(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], steps: Sequence[Step]
) -> str:
    """Return the configuration of an ensemble."""
    texts = []
    for step in steps:
        maps = [
            f'      {field} {{ key: "{key}" value: "{value}" }}\n'
            for field, entries in (("input_map", step.inputs), ("output_map", step.outputs))
            for key, value in entries.items()
        ]
        texts.append(
            f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}'
        )
    return f"""\
name: "{name}"
platform: "ensemble"
max_batch_size: 0

{tensors("input", inputs)}
{tensors("output", outputs)}
ensemble_scheduling {{
  step [
{",".join(chr(10) + text for text in texts).lstrip(chr(10))}
  ]
}}
"""


TRITON = "nvcr.io/nvidia/tritonserver:26.07-py3"
FOLDER, GENERATE, PREPROCESS, ENSEMBLE = "triton", "fovea_generate", "fovea_preprocess", "fovea_ensemble"
FLAGS = (
    "stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs", "return_num_input_tokens",
    "return_num_output_tokens",
)  # fmt: skip
GENERATE_INPUTS = (
    Tensor("text_input", "STRING", (1,), True),
    Tensor("question", "STRING", (1,), True),
    Tensor("messages", "STRING", (1,), True),
    Tensor("image", "STRING", (-1,), True),
    Tensor("pixels", "UINT8", (-1, -1, 3), True),
    Tensor("sampling_parameters", "STRING", (1,), True),
    *(Tensor(name, "BOOL", (1,), True) for name in FLAGS),
)
GENERATE_OUTPUTS = (
    Tensor("text_output", "STRING", (1,)),
    Tensor("finish_reason", "STRING", (1,)),
    Tensor("num_input_tokens", "UINT32", (1,)),
    Tensor("num_output_tokens", "UINT32", (1,)),
)
ENSEMBLE_INPUTS = (
    Tensor("image", "STRING", (1,)),
    Tensor("text_prompt", "STRING", (1,)),
    Tensor("stream", "BOOL", (1,)),
    Tensor("sampling_parameters", "STRING", (1,)),
)
MOST_DECODERS = 4
"""Processes of `fovea_preprocess` at most; each has decoders of its own."""


def render(spec: DeploySpec) -> Files:
    """Return the files for the first pool."""
    pool = spec.pools[0]
    models = f"{FOLDER}/models"
    return {
        f"{FOLDER}/Dockerfile": _dockerfile(),
        f"{FOLDER}/start.sh": _start(spec),
        f"{FOLDER}/openai.sh": _openai(spec, pool),
        f"{models}/{GENERATE}/config.pbtxt": _generate(spec, pool),
        f"{models}/{GENERATE}/1/model.py": _source("generate_model.py"),
        f"{models}/{PREPROCESS}/config.pbtxt": _preprocess(spec, pool),
        f"{models}/{PREPROCESS}/1/model.py": _source("preprocess_model.py"),
        f"{models}/{ENSEMBLE}/config.pbtxt": _ensemble(),
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


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


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


def _generate(spec: DeploySpec, pool: Pool) -> str:
    kind = "kind: KIND_GPU count: 1 gpus: [ 0 ]" if pool.hardware == "cuda" else "kind: KIND_CPU count: 1"
    return python_model_config(
        GENERATE,
        GENERATE_INPUTS,
        GENERATE_OUTPUTS,
        decoupled=True,
        instances=kind,
        settings=_settings(spec, pool),
    )


def _preprocess(spec: DeploySpec, pool: Pool) -> str:
    return python_model_config(
        PREPROCESS,
        (Tensor("image", "STRING", (1,)),),
        (Tensor("pixels", "UINT8", (-1, -1, 3)),),
        decoupled=False,
        instances=f"kind: KIND_CPU count: {min(MOST_DECODERS, pool.cpus)}",
        settings={"media": _settings(spec, pool)["media"]},
    )


def _ensemble() -> str:
    same = {"stream": "stream", "sampling_parameters": "sampling_parameters"}
    steps = (
        Step(PREPROCESS, {"image": "image"}, {"pixels": "decoded_image"}),
        Step(
            GENERATE,
            {"pixels": "decoded_image", "question": "text_prompt", **same},
            {"text_output": "generated_text"},
        ),
    )
    return ensemble_config(ENSEMBLE, ENSEMBLE_INPUTS, (Tensor("generated_text", "STRING", (1,)),), steps)


def _dockerfile() -> str:
    return f"""\
# Triton with Fovea. Build it in a folder that holds this file, the scripts, models/ and Fovea's wheel:
#   cp dist/fovea_vlm-*.whl triton/ && docker build -t fovea-triton triton
FROM {TRITON}
COPY fovea_vlm-*.whl /tmp/
# The wheel's own pins hold: each release of it names the versions that it was tested with.
RUN pip install --no-cache-dir /tmp/fovea_vlm-*.whl && rm /tmp/fovea_vlm-*.whl
COPY models /models
COPY --chmod=755 start.sh openai.sh /usr/local/bin/
USER 1000
ENV HOME=/tmp
EXPOSE 8000 8001 8002 9000
ENTRYPOINT ["/usr/local/bin/start.sh"]
"""


def _start(spec: DeploySpec) -> str:
    return f"""\
#!/bin/sh
# Starts Triton: HTTP on 8000, gRPC on 8001, metrics on 8002. Arguments are passed on to Triton.
set -eu
exec tritonserver \\
  --model-repository="${{MODEL_REPOSITORY:-/models}}" \\
  --exit-on-error=true \\
  --exit-timeout-secs={spec.stop.drain_s} \\
  --metrics-config=summary_latencies=true \\
  "$@"
"""


def _openai(spec: DeploySpec, pool: Pool) -> str:
    limit = spec.max_body_mib << 20
    return f"""\
#!/bin/sh
# Starts Triton with its OpenAI frontend on port 9000. It takes text; images go to Triton's own ports.
set -eu
tokenizer=$(python3 -c 'from fovea.engine.load import resolve; print(resolve("{pool.model}", ""))')
cd "${{OPENAI_FRONTEND:-/opt/tritonserver/python/openai}}"
# Only {GENERATE} has the inputs that the frontend sends. Without --backend vllm, it would send those of
# TensorRT-LLM.
exec python3 openai_frontend/main.py \\
  --model-repository "${{MODEL_REPOSITORY:-/models}}" \\
  --model-control-mode explicit --load-model {GENERATE} \\
  --backend vllm \\
  --tokenizer "$tokenizer" \\
  --default-max-tokens 512 \\
  --http-max-input-size {limit} \\
  --openai-port "${{OPENAI_PORT:-9000}}" \\
  --enable-kserve-frontends \\
  "$@"
"""

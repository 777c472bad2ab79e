"""Parts that the containers of all clouds share: the settings of `fovea serve`, and the image around it."""

from __future__ import annotations

from typing import Any

from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.toml_text import toml_text

PARSE = "import ast, sys; ast.parse(open(sys.argv[1]).read())"
"""A program that checks the syntax of a Python file."""


def server_config(spec: DeploySpec, pool: Pool, comment: str, **changes: Any) -> str:
    """Return the file of `--config`, without the model and the address, which the entry point sets.

    changes: settings that the cloud needs. They are overridden by the pool's own settings.
    """
    values = {**spec.engine_settings(pool), **changes, **pool.settings}
    for name in ("model", "host", "port"):
        values.pop(name)
    return toml_text(values, comment=comment)


def dockerfile(spec: DeploySpec, pool: Pool, folder: str, names: tuple[str, ...], user: str) -> str:
    """Return an image that adds scripts to the pool's image, and starts `entrypoint.sh`.

    folder: of the rendered files, for the comment. names: of the files to add.
    user: the line that sets the user.
    """
    return f"""\
# docker build -t {spec.name}-{folder} {folder}
FROM {spec.image_of(pool)}
USER 0
COPY --chmod=755 {" ".join(names)} /opt/fovea/
{user}
ENTRYPOINT ["/opt/fovea/entrypoint.sh"]
"""

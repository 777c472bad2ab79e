"""Rendered objects against the schemas of their operators, which `make crd-schemas` downloads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tools.crds import FOLDER

from fovea.deploy.lint.fields import specifications
from fovea.deploy.lint.objects import LOADER, Object, load_objects
from tests.deploy import manifests


def strict(schema: Any) -> Any:
    """Return a schema of OpenAPI as a JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {
        key: {name: strict(each) for name, each in value.items()} if key == "properties" else strict(value)
        for key, value in schema.items()
        if key not in ("default", "description", "format", "nullable") and not key.startswith("x-")
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        found["additionalProperties"] = False
    return found


def schemas(folder: Path) -> dict[str, Any]:
    """Return the schemas of `spec` by API version and kind."""
    found = {}
    for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        for each in yaml.load_all(path.read_text(encoding="utf-8"), LOADER):
            if each and each.get("kind") == "CustomResourceDefinition":
                group, kind = each["spec"]["group"], each["spec"]["names"]["kind"]
                for version in each["spec"]["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                    found[f"{group}/{version['name']} {kind}"] = strict(schema)
    return found


def custom() -> Iterator[Object]:
    """Yield all rendered objects that are none of Kubernetes itself."""
    for spec in manifests.SPECS:
        files = manifests.files(spec)
        for folder in manifests.folders(files):
            for each in load_objects(files, folder).objects:
                if f"{each.api} {each.kind}" in specifications():
                    yield each


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="`make crd-schemas` has not been run")
def test_objects_keep_to_the_schemas_of_their_operators() -> None:
    known = schemas(FOLDER)
    assert set(known) >= set(specifications())
    for each in custom():
        validator = jsonschema.Draft202012Validator(known[f"{each.api} {each.kind}"])
        assert [error.message for error in validator.iter_errors(each.spec)] == [], str(each)

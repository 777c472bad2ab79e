"""One setting tells which components are compiled, and how."""

from __future__ import annotations

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.config.model import CompileModes


def test_components_by_name() -> None:
    modes = CompileModes.of("encoder=default, decoder=reduce-overhead")
    assert modes == CompileModes("default", "off", "reduce-overhead")
    assert modes.active == {"encoder": "default", "decoder": "reduce-overhead"}


def test_one_word_applies_to_all_components() -> None:
    assert CompileModes.of("max-autotune") == CompileModes(*["max-autotune"] * 3)
    assert not CompileModes.of("off").active


@pytest.mark.parametrize(
    "text", ["", "fast", "encoder", "encoder=fast", "head=default", "encoder=off,encoder=default", "default,"]
)
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"accepted: one of off, default.*encoder, projector, decoder"
    ) as told:
        EngineConfig.of(compile=text)
    assert told.value.param == "compile"

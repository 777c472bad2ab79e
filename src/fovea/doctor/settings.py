"""Settings of `fovea doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """How long and how hard the checks of load try, and how large a typical request is.

    No name is that of a setting of a server, because both are read from the same environment.
    """

    load_seconds: float = setting(
        4.0, "Seconds of each level of load; longer levels give steadier percentiles.", low=0.1, high=3600
    )
    max_clients: int = setting(64, "Most clients in the search for the saturation.", low=1, high=4096)
    start_timeout: float = setting(
        600.0, "Seconds that a server which doctor starts has until it is ready.", low=1, high=86400
    )

    image_tokens: int = setting(256, "Visual tokens of the image of a typical request.", low=1, high=10**6)
    token_side: int = setting(
        28,
        "Side of a visual token in pixels: 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL.",
        low=1,
        high=256,
    )
    prompt_tokens: int = setting(56, "Text tokens of a typical request.", low=1, high=10**6)
    output_tokens: int = setting(64, "Tokens of a typical answer.", low=2, high=10**6)

    def __post_init__(self) -> None:
        check_settings(self)

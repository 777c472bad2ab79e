"""The types in which a model's weights, keys and values are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.core.config_files import nearest
from fovea.core.errors import ConfigError
from fovea.core.precision import Device, Obstacle, kv_obstacle, obstacle

FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by the name of its type."""
QUANTIZED = ("int8", "int4", "fp8", "awq", "gptq")
"""Formats of quantized weights.

int8, int4, fp8: those of Fovea's setting `quantization` (`kernels.quantize`, `kernels.float8`).
awq, gptq: 4 bits in groups of 128, of checkpoints that are quantized already. Fovea keeps their codes.
"""
STORAGES = ("plain", "onednn", "panels")
"""Layouts of weights.

plain: as in the checkpoint; on GPUs, and with torch's kernels.
onednn: as many bytes, reordered for oneDNN; with its kernels on a CPU.
panels: that of Fovea's C++ kernels, for bfloat16 on a CPU. A bfloat16 weight takes three quarters of its
    bytes.
"""
KV_TYPES = (*FLOATS, "int8", "fp8")
"""Types of keys and values. int8 and fp8 are those of Fovea's setting `kv_dtype`."""
KV_SCALE_BYTES = 2
"""Bytes of a scale in 8 bits. Each head of each token has one for its key and one for its value."""
DECODER_PARTS = ("decoder", "experts", "cross")


def _check(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value in accepted:
        return
    names = [item for item in accepted if item]
    raise ConfigError(f"{name} is {value!r}; {nearest(str(value), names)}", param=name)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a model's numbers.

    dtype: type of rows, norms, states, and of everything that has no format: a name in FLOATS.
    decoder, encoder, head: format of the linear maps of the decoder, of the vision tower with the projector,
        and of the language head: a name in FLOATS or QUANTIZED; "": `dtype`.
    kv: type of keys and values, a name in KV_TYPES; "": `dtype`.
    storage: layout of the weights, a name in STORAGES.

    Raises ConfigError, naming the field and the accepted values.
    """

    dtype: str = "bfloat16"
    decoder: str = ""
    encoder: str = ""
    head: str = ""
    kv: str = ""
    storage: str = "plain"

    def __post_init__(self) -> None:
        formats = ("", *FLOATS, *QUANTIZED)
        accepted = {"dtype": tuple(FLOATS), "decoder": formats, "encoder": formats, "head": formats}
        for name, values in {**accepted, "kv": ("", *KV_TYPES), "storage": STORAGES}.items():
            _check(name, getattr(self, name), values)

    def format_of(self, part: str) -> str:
        """Return the format of the linear maps of a part (`planner.shape.PARTS`)."""
        if part in DECODER_PARTS:
            return self.decoder or self.dtype
        return (self.head if part == "head" else self.encoder) or self.dtype

    def obstacle(self, device: Device) -> Obstacle | None:
        """Return why Fovea's engine refuses these types on a device; None: it accepts them."""
        for format in dict.fromkeys((self.decoder, self.encoder, self.head)):
            found = obstacle(format if format in QUANTIZED else "none", self.dtype, device)
            if found is not None:
                return found
        return kv_obstacle(self.kv, device)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of `dtype`."""
        return FLOATS[self.dtype]

    def kv_itemsize(self, head_dim: int) -> float:
        """Return the bytes of a number of a key or a value, its share of a scale included.

        head_dim: numbers of a head; in 8 bits each head of each token has a scale.
        """
        kind = self.kv or self.dtype
        return float(FLOATS[kind]) if kind in FLOATS else 1 + KV_SCALE_BYTES / head_dim


RECIPES = {
    "none": Precision(),
    "int8": Precision(decoder="int8", encoder="int8", head="int8"),
    "int4": Precision(decoder="int4", encoder="int8", head="int8"),
    "fp8": Precision(decoder="fp8", encoder="fp8"),
}
"""Formats by the values of Fovea's setting `quantization`; the same as `engine.models.recipe`."""


def recipe(name: str, dtype: str = "bfloat16", storage: str = "plain") -> Precision:
    """Return the precision of a value of the setting `quantization`.

    dtype, storage: as in `Precision`.

    Raises ConfigError for an unknown name.
    """
    _check("quantization", name, tuple(RECIPES))
    return replace(RECIPES[name], dtype=dtype, storage=storage)


PARTS = ("decoder", "encoder", "head", "kv")
"""Parts that a text can name. Those that it does not name keep the model's type."""


def parse_precision(text: str) -> Precision:
    """Return the precision that a text means.

    text: a value of the setting `quantization`, such as "int8", or formats of parts, such as
        "decoder=int4,encoder=int8,kv=fp8".

    Raises ConfigError, which names the part, the nearest name, and the accepted values.
    """
    if "=" not in text:
        if text not in RECIPES:
            raise ConfigError(
                f"precision {text!r} is not known; {nearest(text, RECIPES)}, or formats of "
                "parts, such as decoder=int4,encoder=int8,kv=fp8",
                param="precision",
            )
        return RECIPES[text]
    formats: dict[str, str] = {}
    for item in text.split(","):
        part, equals, format = (piece.strip() for piece in item.partition("="))
        if not equals or not format:
            raise ConfigError(
                f"precision {text!r}: {item.strip()!r} names no format; accepted: part=format, such as "
                "decoder=int4",
                param="precision",
            )
        if part not in PARTS:
            raise ConfigError(
                f"precision {text!r}: there is no part {part!r}; {nearest(part, PARTS)}", param="precision"
            )
        if part in formats:
            raise ConfigError(f"precision {text!r} names {part!r} twice", param="precision")
        formats[part] = format
    try:
        return replace(Precision(), **formats)
    except ConfigError as error:
        raise ConfigError(f"precision {text!r}: {error.message}", param="precision") from error

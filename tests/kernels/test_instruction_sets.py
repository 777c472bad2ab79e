"""Which instruction set the kernels get, on simulated processors."""

from __future__ import annotations

import ctypes
import errno
import functools
import platform

import pytest

from fovea.core.errors import ConfigError
from fovea.kernels.native import instruction_sets
from fovea.kernels.native.instruction_sets import chosen, has_bf16_units, supported

ZEN3 = "fma avx avx2 f16c bmi1 bmi2 vaes vpclmulqdq"
ALDER_LAKE = f"{ZEN3} avx_vnni gfni"
ICE_LAKE = f"{ZEN3} gfni avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni avx512vbmi avx512_vbmi2"
ZEN4 = f"{ICE_LAKE} avx512_bitalg avx512_vpopcntdq avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN4} amx_tile amx_bf16 amx_int8"
AMX_REFUSAL = instruction_sets.amx_refusal
A72 = "fp asimd evtstrm aes crc32 cpuid"
N1 = f"{A72} asimdhp asimddp"
V2 = f"{N1} sve bf16 i8mm"


def machine(monkeypatch: pytest.MonkeyPatch, name: str, flags: str, variable: str = "") -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(instruction_sets, "amx_refusal", lambda: "")
    monkeypatch.setenv("FOVEA_NATIVE_KERNELS", variable)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("x86_64", "sse4_2 avx", []),
        ("x86_64", ZEN3, ["avx2"]),
        ("AMD64", ALDER_LAKE, ["avx2_vnni", "avx2"]),
        ("x86_64", ICE_LAKE, ["avx2"]),
        ("x86_64", ZEN4, ["avx512", "avx2"]),
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512", "avx2"]),
        ("aarch64", A72, ["neon"]),
        ("arm64", N1, ["neon_dotprod", "neon"]),
        ("aarch64", f"{N1} bf16", ["neon_bf16", "neon_dotprod", "neon"]),
        ("aarch64", V2, ["neon_i8mm", "neon_bf16", "neon_dotprod", "neon"]),
        ("riscv64", V2, []),
    ],
)
def test_the_fastest_set_comes_first(
    monkeypatch: pytest.MonkeyPatch, name: str, flags: str, expected: list[str]
) -> None:
    machine(monkeypatch, name, flags)
    assert [each.name for each in supported()] == expected
    best = chosen()
    assert (best.name if best else None) == (expected or [None])[0]


@pytest.mark.parametrize("refused", [False, True])
def test_amx_needs_the_permission_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """An old kernel, gVisor and a thread with a small signal stack refuse matrix registers that the CPU has.

    Using them without permission would end the process with SIGILL.
    """
    asked: list[tuple[int, ...]] = []

    class Libc:
        def syscall(self, *arguments: int) -> int:
            asked.append(arguments)
            ctypes.set_errno(errno.EINVAL)
            return -1 if refused else 0

    machine(monkeypatch, "x86_64", SAPPHIRE_RAPIDS)
    monkeypatch.setattr(instruction_sets, "amx_refusal", functools.cache(AMX_REFUSAL.__wrapped__))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    assert [each.name for each in supported()] == ["amx", "avx512", "avx2"][refused:]
    supported()
    assert asked == [(158, 0x1023, 18)], "once per process"
    assert ("does not allow it, so AVX-512 is used: arch_prctl: Invalid argument" in caplog.text) is refused


@pytest.mark.parametrize(
    ("variable", "expected", "bf16"),
    [("on", "avx512", True), ("", "avx512", True), ("avx512", "avx512", True), ("avx2", "avx2", False),
     ("off", None, False)],
)  # fmt: skip
def test_the_variable_imitates_a_lesser_machine(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: str | None, bf16: bool
) -> None:
    machine(monkeypatch, "x86_64", ZEN4, variable)
    best = chosen()
    assert (best.name if best else None) == expected
    assert has_bf16_units() is bf16


@pytest.mark.parametrize(
    ("flags", "bf16"), [(ZEN3, False), (f"{ZEN3} amx_tile", True), (ZEN4, True), (V2, True), (N1, False)]
)
def test_bf16_units(monkeypatch: pytest.MonkeyPatch, flags: str, bf16: bool) -> None:
    machine(monkeypatch, "x86_64", flags)
    assert has_bf16_units() is bf16


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("no", "which is not known"), ("avx512", r"which this CPU \(x86_64\) cannot run")],
)
def test_a_set_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, reason: str
) -> None:
    machine(monkeypatch, "x86_64", ZEN3, variable)
    with pytest.raises(ConfigError, match=f"'{variable}', {reason}; accepted here: on, off, avx2$"):
        chosen()

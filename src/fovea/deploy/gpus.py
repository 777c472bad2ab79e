"""GPUs that pools can name, and the MIG profiles that exist on each.

Profiles are those of NVIDIA's MIG user guide (tables of supported GPUs and profiles). A profile's name holds
its share of compute ("3g" of seven) and its memory.
"""

from __future__ import annotations

GPUS = (
    "T4", "L4", "A10", "L40S", "A30", "A100-40GB", "A100-80GB", "H100-80GB", "H100-96GB", "H200-141GB",
    "B200-180GB",
)  # fmt: skip

MIG_PROFILES: dict[str, tuple[str, ...]] = {
    "A30": ("1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"),
    "A100-40GB": ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    "A100-80GB": ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    "H100-80GB": ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    "H100-96GB": ("1g.12gb", "1g.12gb+me", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"),
    "H200-141GB": ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    "B200-180GB": ("1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
}
"""MIG profiles by GPU. A GPU that is not listed has no MIG."""

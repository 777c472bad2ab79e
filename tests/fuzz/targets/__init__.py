"""One file per target: `target(data)` raises only on a finding."""

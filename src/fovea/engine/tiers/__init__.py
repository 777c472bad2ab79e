"""Tiers of encoder outputs below the device's memory: host memory and disk."""

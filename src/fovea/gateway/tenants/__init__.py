"""Tenants of the gateway: their keys, their limits per minute, and their budgets per day and month."""

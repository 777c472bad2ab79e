"""The chaos day: faults by a seeded schedule against a whole stack under mixed load: `make chaos`.

docs/reliability.md says what is injected, what is checked on every answer, and how to read the report.
"""

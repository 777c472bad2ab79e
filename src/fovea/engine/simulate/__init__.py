"""The scheduler without a model: the same decisions, on steps that cost what a formula says.

`cost` says how long a step takes, `fit` learns that from a real engine. `trace` and `generate` say who arrives when,
`machine` executes plans on paper, `run` moves a virtual clock over it all, and `report` is what comes of it. `serving` is
the same machine in real time, behind the protocol that servers speak.
"""

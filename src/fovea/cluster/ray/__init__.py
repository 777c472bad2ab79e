"""Fovea on Ray: engines and batches. The only package that imports ray; it needs the extra `cluster`.

spec.py        cluster.toml: models, roles, resources, scaling, ingress
placement.py   the bytes that a replica needs, and the nodes where it fits
build.py       a spec as a configuration of Ray Serve
cluster.py     up and down; status.py: the state as values
ingress.py     how a request finds its replica; router.py: for Ray Serve's own proxy
replica.py     a replica of Ray Serve: one engine, and what Ray needs to know of it
engine.py      `fovea serve` as a child process, which ends with its replica
guard.py       ends what a killed `up` leaves behind
relay.py       passes requests on to that engine, and its answers back
peers.py       fixed ports that lead to engines of another role, which come and go
signals.py     the signals of a replica, from its engine's metrics
policy.py      scaling: the signals of all replicas become a number of replicas
batch.py       batches of requests over Ray Data; folders.py: where their images lie
board.py       what replicas and the policy publish for each other and for `status`
"""

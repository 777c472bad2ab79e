"""Engines on a cluster of Ray: `fovea cluster up`, `status` and `down`. The only package that imports ray.

spec.py        cluster.toml: models, roles, resources, scaling, ingress
placement.py   the bytes that a replica needs, and the nodes where it fits
ingress.py     how requests find a replica: HAProxy's rules, or the order of a key
engine.py      `fovea serve` as a child process, which ends with its replica
relay.py       passes requests on to the engine of a replica, and its answers back
replica.py     a replica of Ray Serve: one engine, its relay, its signals
policy.py      scaling: the signals of all replicas become a number of replicas
board.py       what replicas and the policy publish for peers and for `status`
deploy.py      a spec as applications of Ray Serve; up, status and down
"""

"""Checks of rendered manifests that schemas cannot make: whether objects fit together.

    python -m fovea.deploy.lint FOLDER...     # a kustomization, or a folder of manifests

    load        objects of a folder, as kustomize would build them
    objects     one object, and the pods that it describes
    pods        security, probes, the time that a pod has to end, and what its volumes and variables name
    network     Services, NetworkPolicies and PodMonitors: do their selectors and ports find pods?
    scale       autoscalers and disruption budgets
    routes      routes of Istio and of the Gateway API
    gpu         layouts of MIG
    fields      the fields of custom resources
    run         all of them

Everything here is pure: texts go in, sentences come out.
"""

"""Copies of metrics under the names that other systems use."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from fovea.observe.aliases import ENGINE, Alias


def bound_text(upper: float) -> str:
    """Write the upper bound of a bucket as Prometheus does."""
    return str(floatToGoString(upper))  # type: ignore[no-untyped-call]


def copy_under_alias(family: Metric, alias: Alias, model: str) -> Metric:
    """Return a copy of a metric under another name, with the labels and the unit of that name.

    model: the served model's name.
    """
    copy = Metric(alias.name, f"{family.name}{_difference(alias)}", family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        labels = _labels(sample, alias)
        if labels is None or suffix == "_created":
            continue
        if alias.of_model:
            labels |= {"model_name": model, "engine": ENGINE}
        counts = suffix in ("_bucket", "_count")
        copy.add_sample(alias.name + suffix, labels, sample.value * (1 if counts else alias.scale))
    return copy


def _labels(sample: Sample, alias: Alias) -> dict[str, str] | None:
    """The labels of the copy of a sample; None if the copy does not hold the sample."""
    labels = dict(sample.labels)
    upper = labels.pop("le", None)
    if alias.value:
        if alias.value not in labels.values():
            return None
        labels = {}
    elif alias.label:
        labels = dict.fromkeys((alias.label,), next(iter(labels.values())))
    if upper is not None:
        labels["le"] = bound_text(float(upper) * alias.scale) if alias.scale != 1 else upper
    return labels


def _difference(alias: Alias) -> str:
    """Tell, for the help text, how the copy differs from the metric."""
    only = f" of {alias.value}" if alias.value else ""
    times = f" times {alias.scale:g}" if alias.scale != 1 else ""
    return only + times

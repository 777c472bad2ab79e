"""Dashboards, recording rules and alerts for Prometheus, Alertmanager and Grafana."""

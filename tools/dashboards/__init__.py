"""Generates the files of fovea.deploy.monitoring: dashboards, rules, tests of rules, and tables of pages."""

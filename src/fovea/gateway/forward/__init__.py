"""Sends requests to backends and passes their answers on."""

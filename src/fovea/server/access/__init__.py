"""Clients, the limits of their keys, and the rules that say which key opens which route."""

"""Deployment artefacts, rendered from one description of a deployment."""

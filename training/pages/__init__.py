"""Training of fovea-page, a model that reads pages."""

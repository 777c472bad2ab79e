"""Routes for operators: the fleet, tenants and their keys, usage and experiments."""

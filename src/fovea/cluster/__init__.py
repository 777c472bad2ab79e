"""Many machines: replicas on Ray, their number, and fleets on paper. Only `cluster.ray` imports Ray."""

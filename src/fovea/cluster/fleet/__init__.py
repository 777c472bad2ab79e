"""A fleet on paper: hundreds of replicas behind the gateway's own routing, on a virtual clock."""

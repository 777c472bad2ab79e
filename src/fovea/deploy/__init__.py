"""Files of a deployment rendered from one spec: containers, proxies, Kubernetes, Triton, clouds."""

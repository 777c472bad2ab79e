"""Transfer of encoder outputs and KV blocks between engine processes.

Control messages between the processes travel over authenticated HTTP, and each may carry an `Offer`. The
bytes that an offer stands for travel by a connector: shared memory on one host, Mooncake's transfer engine
between hosts, or a folder that the processes share.

It must not import torch.
"""

"""The planner: how much memory, time and money a model needs on some hardware for some workload.

Everything here is arithmetic on frozen values, without torch and without a model in memory.
"""

"""The response cache of the gateway: whole answers to requests that were answered before, by exact keys.

A wrong answer is worse than a miss. In every case of doubt nothing is stored, or nothing is found.
"""

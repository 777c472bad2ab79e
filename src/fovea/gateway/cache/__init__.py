"""The response cache of the gateway: whole answers to requests that were answered before, by exact keys.

    key.py, directives.py       which requests can be cached, and under which key
    assemble.py, replay.py      an answer as one JSON body, from a stream and to a stream
    entry.py, recording.py      a stored answer, and how one is made from the bytes of a backend
    store.py                    the protocol of stores: memory.py, redis.py, and layered.py for both
    flight.py                   equal requests at the same time ask a backend once
    plan.py, hit.py, recorder.py    a request's decision, its stored answer, and the recorder of a new one
    cache.py, build.py          `ResponseCache`, which the data path calls, and how it is built

A wrong answer is worse than a miss. In every case of doubt nothing is stored, or nothing is found.
"""

"""The production checklist as checks of a machine, a model and a server.

    check.py             checks and their verdicts as values; `examine` makes checks and returns results
    subject.py           what checks read; tests fill it with values
    machine.py           files, programs and addresses of this machine
    server.py            HTTP, and questions to a server
    launch.py            servers that doctor starts itself
    load.py              questions at the same time, and the search for a server's saturation
    pictures.py          pictures, and servers of images that misbehave
    checks/              one file per group of checks; `checks.CHECKS` lists them

No module here imports an engine, a server, the load generator or torch: cli hands over what checks need of
them.
"""

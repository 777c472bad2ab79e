"""The production checklist as checks of a machine, a model and a server.

    verdict.py, check.py              values: a verdict, and a check
    examine.py                        makes the checks, and returns their results
    settings.py                       how long and how hard the checks of load try
    subject.py, facts.py              what checks read; tests fill it with values
    machine.py, web.py, launch.py     the three seams to the world: files and programs, HTTP, own processes
    server.py, clients.py             questions to a server, one by one and at the same time
    load_test.py                      load for a server
    image_hosts.py, pictures.py       servers of images that misbehave, and pictures
    checks/                           one file per group of checks; `checks/all.py` lists them

No module here imports an engine, a server, the load generator or torch: cli hands over what checks need of
them.
"""

"""Decoding of clients' images and videos in processes of its own, which may do nothing else.

Decoders are large C libraries, and their input comes from strangers. So they run where a crash, an endless
loop or a takeover harms one file only:

    messages    what server and worker say to each other, over a socket pair
    worker      the process that decodes: Pillow for images, PyAV for videos
    jail        what the worker gives up before its first file: memory, files, network, root
    process     one worker, seen from the server: start, ask, kill
    pool        the workers: who is free, and who is started again
    decoder     the decoders that the rest of the media floor uses, with and without a sandbox
"""

"""Decoding of clients' images and videos in separate processes, which may do nothing else.

Decoders are large C libraries, and their input comes from strangers. So they run where a crash, an endless
loop or malicious code harms one file only:

    messages    messages between server and worker, over a socket pair
    worker      the process that decodes: Pillow for images, PyAV for videos, PDFium for PDF files
    jail        what the worker gives up before its first file: memory, files, network, root
    process     one worker, seen from the server: start, ask, kill
    pool        the workers: which are free, and when a new one is started
    decoder     the decoders that the rest of the package uses, with and without a sandbox
    documents   pages of PDF files as pictures, always in a sandbox
"""

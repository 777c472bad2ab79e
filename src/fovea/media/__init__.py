"""Media input: from the URLs of a request to images with a content identity, and to open videos.

The steps of one image, by module; `load` runs them for all images and videos of a request:

    source              parses the URL, and reads inline data or a local file
    fetch.fetcher       returns stored bytes, or downloads them
    image.probe         reads and checks the header, by the module of the image's format
    image.decode        names the image by its content
    load.MediaBudget    counts the bytes that requests hold
    load.EncodedPixels  decodes the pixels once they are read: cache, then sandbox, then image.decode

This package knows no model, no tokens and no HTTP server. Input is treated as hostile until it is decoded.
"""

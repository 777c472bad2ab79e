"""Media input: from the URLs of a request to images with a content identity, and to open videos.

The steps of one image, by module; `load` runs them for all images and videos of a request:

    source              parses the URL: inline data, a file or a remote URL
    fetch.cache         returns stored bytes, or downloads them with fetch.fetcher
    files               reads a local file
    image.probe         reads and checks the header (image.formats)
    image.identity      names the image by its content
    budget              counts the bytes that requests hold
    pixels              decodes the pixels once they are read: image.cache, then sandbox, then image.decode

This floor knows no model, no tokens and no HTTP server. Input is treated as hostile until it is decoded.
"""

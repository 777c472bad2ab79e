"""Hashed keys, token buckets, and logs about who asked for what: common to the server and the gateway."""

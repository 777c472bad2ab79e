"""One request for an answer, from its body to its last byte."""

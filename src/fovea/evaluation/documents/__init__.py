"""Pages of documents, which other people's programs draw from generated facts, and questions about them.

docs/documents.md describes them.
"""

"""Pages of PDF files as pictures."""

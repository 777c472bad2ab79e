"""The roofline: lower bounds for the time of each stage. It must not import transformers."""

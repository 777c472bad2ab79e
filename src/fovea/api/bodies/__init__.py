"""Bodies of answers in OpenAI's form: complete ones, chunks of streams, and errors."""

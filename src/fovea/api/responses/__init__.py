"""OpenAI's Responses API: its requests become chat requests, and answers become its items and events."""

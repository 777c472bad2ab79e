"""The page for people at /: its files, and the headers with which they are sent."""

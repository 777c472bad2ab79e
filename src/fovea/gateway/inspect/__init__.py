"""What a request asks for, read before anything is forwarded: its model, its images, its size."""

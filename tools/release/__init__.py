"""What a release needs beside its wheels: checks of its version, and a bill of materials."""

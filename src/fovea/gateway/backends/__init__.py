"""The backends: their list, their health and their outstanding work."""

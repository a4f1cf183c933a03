"""Compares ours with what papers describe and engines do, on the simulated engine; see --help."""

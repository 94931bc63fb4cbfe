"""Static analysis of the sources of functions: they are read, never run."""

"""What runs inside the sandbox: programs of the standard library alone, started as the top-level package `inside`."""

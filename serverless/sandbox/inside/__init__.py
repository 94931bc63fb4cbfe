"""The programs inside the sandbox: standard library only, started as the top-level package `inside`."""

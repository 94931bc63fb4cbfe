"""A function that does not load."""

import no_such_module  # noqa: F401


def handler(sample):
    return 1.0

"""The composition root: from a resolved spec to a running control plane. Only here are concrete adapters named.

Importing the package imports none of its modules: a command that only checks a spec must not wait for a run's parts.
"""

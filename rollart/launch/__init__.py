"""From a resolved spec to a running control plane. Concrete adapters are named only here.

Importing the package imports none of its modules, so that a command that only checks a spec does not wait for the parts
of a run.
"""

"""Fakes, worlds on virtual time and the in-memory ledger, for tests and benchmarks: the product never imports them."""

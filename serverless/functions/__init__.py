"""Reward functions that ship with the package: a rule, a process verifier and a reward model. Each is one file that
packs like a user's own; name one in a spec as `serverless.functions.exact_match`."""

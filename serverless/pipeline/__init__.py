"""The path of an item to its outcome: `offload` has the stages in their order."""

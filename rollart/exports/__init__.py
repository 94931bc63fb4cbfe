"""A run's figures in other tools' protocols: a program beside the run that reads its ledger."""

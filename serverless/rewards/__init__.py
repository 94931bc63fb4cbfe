"""Ready-made rewards, to be named in a run's spec: `serverless.rewards.code_tests:CodeTests` and the like."""

"""Stateless offload: reward functions leave the training process and come back as typed outcomes and a bill."""

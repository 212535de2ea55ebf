"""Federated continual learning in JAX: many clients, each with a stream of tasks, on one accelerator."""

__version__ = "0.1.0"

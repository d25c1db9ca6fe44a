"""Reward functions and the killable processes that run them; no jax here."""

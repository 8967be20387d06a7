"""Baselines without a policy: slice finders of the literature and of practice; rules for cause and abstention.

Everything here reads the agent-visible tables through the episode's own database (`campaign.read`) and nothing else.
"""

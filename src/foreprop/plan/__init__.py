"""Predicts steps by arithmetic (lab/docs/model.md), measures models and links, and chooses."""

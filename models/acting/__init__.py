"""Policies on an actor: networks that compute outputs, and samplers that choose actions."""

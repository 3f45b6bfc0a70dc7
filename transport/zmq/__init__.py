"""Samples and weights over ZeroMQ: actors' clients, the connector, the relay."""

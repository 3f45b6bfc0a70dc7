"""The parts of benchmarks/chaos.py: topologies, faults, a seeded schedule, invariants, sessions."""

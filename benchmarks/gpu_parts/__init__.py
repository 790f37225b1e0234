"""The parts of benchmarks/gpu.py: one file per subject, and a table of them all (`table`)."""

"""Finds the answer in a response and compares it with the expected answer."""
